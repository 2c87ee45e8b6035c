"""Collectives are counted as often as they run; an ODE's step moves what its baseline's does."""

import copy
import importlib.util
from dataclasses import replace
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers import auto_mesh, setup_of
from jax.sharding import PartitionSpec

from configs import default
from t5x_diffeq.planner.collectives import BETWEEN_SLICES, KINDS, collectives, traffic
from t5x_diffeq.planner.topology import make_topology
from t5x_diffeq.training.step import lower_train_step

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""

# An outer loop of 16 iterations, noted by the compiler; an inner one from 1 in steps of 2 below 8,
# whose bound and step come through the outer loop's state, and which adds inside a fusion.
LOOPS = (
    "HloModule loops, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}\n"
    + ADD
    + """
%advance (p: s32[], q: s32[]) -> s32[] {
  %p = s32[] parameter(0)
  %q = s32[] parameter(1)
  ROOT %next = s32[] add(%p, %q)
}

%body.1 (state: (s32[], f32[8,4], s32[], s32[])) -> (s32[], f32[8,4], s32[], s32[]) {
  %state = (s32[], f32[8,4]{1,0:T(8,128)S(1)}, s32[], /*index=3*/s32[]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %bound = s32[] get-tuple-element(%state), index=2
  %by = s32[] get-tuple-element(%state), index=3
  %i2 = s32[] fusion(%i, %by), kind=kLoop, calls=%advance
  %r = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1}}
  ROOT %out = (s32[], f32[8,4]{1,0}, s32[], s32[]) tuple(%i2, %r, %bound, %by)
}

%test.1 (state.1: (s32[], f32[8,4], s32[], s32[])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}, s32[], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound.1 = s32[] get-tuple-element(%state.1), index=2
  ROOT %less = pred[] compare(%i.1, %bound.1), direction=LT
}

%body.2 (state.2: (s32[], f32[8,4], s32[], s32[])) -> (s32[], f32[8,4], s32[], s32[]) {
  %state.2 = (s32[], f32[8,4]{1,0}, s32[], s32[]) parameter(0)
  %n = s32[] get-tuple-element(%state.2), index=0
  %one = s32[] constant(1)
  %n2 = s32[] add(%n, %one)
  %x.2 = f32[8,4]{1,0} get-tuple-element(%state.2), index=1
  %bound.2 = s32[] get-tuple-element(%state.2), index=2
  %by.2 = s32[] get-tuple-element(%state.2), index=3
  %by.3 = s32[] copy(%by.2)
  %begin = (s32[], f32[8,4]{1,0}, s32[], s32[]) tuple(%one, %x.2, %bound.2, %by.3)
  %inner = (s32[], f32[8,4], s32[], s32[]) while(%begin), condition=%test.1, body=%body.1
  %y = f32[8,4]{1,0} get-tuple-element(%inner), index=1
  ROOT %out.2 = (s32[], f32[8,4]{1,0}, s32[], s32[]) tuple(%n2, %y, %bound.2, %by.3)
}

%test.2 (state.4: (s32[], f32[8,4], s32[], s32[])) -> pred[] {
  %state.4 = (s32[], f32[8,4]{1,0}, s32[], s32[]) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x.5: f32[8,4]) -> f32[8,4] {
  %x.5 = f32[8,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %eight = s32[] constant(8)
  %two = s32[] constant(2)
  %begin.5 = (s32[], f32[8,4]{1,0}, s32[], s32[]) tuple(%zero, %x.5, %eight, %two)
  %outer = (s32[], f32[8,4]{1,0}, s32[], s32[]) while(%begin.5), condition=%test.2, body=%body.2,\
 backend_config={"known_trip_count":{"n":"16"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %y.5 = f32[8,4]{1,0} get-tuple-element(%outer), index=1
}
"""
)


def program(body):
    return f"HloModule made\n{ADD}\nENTRY %main (x: f32[4]) -> f32[4] {{\n{body}\n}}\n"


def test_nested_loops_multiply():
    (only,) = collectives(LOOPS)
    moved = {kind: t[:2] for kind, t in traffic([only]).items() if t.executions}
    assert moved == {"all-reduce": (16 * 4, 16 * 4 * 8 * 4 * 4)}  # i = 1, 3, 5, 7
    assert (only.devices, str(only.shapes[0])) == (2, "f32[8,4]")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("%bound.2, %by.3)\n}", "%bound.2, %n2)\n}"),  # the inner step varies in the outer loop
        ("%zero = s32[] constant(0)", "%zero = s32[] custom-call(%x.5)"),  # and nothing is noted
    ],
)
def test_an_unknown_trip_count_is_an_error(old, new):
    text = LOOPS.replace(old, new).replace('"known_trip_count":{"n":"16"},', "")
    text = text.replace("ROOT %true = pred[] constant(true)", "ROOT %t = pred[] compare(%n.4, %k)")
    text = text.replace("pred[] compare(%n.4, %k)", "pred[] compare(%n.4, %k), direction=LT")
    text = text.replace(
        "  ROOT %t",
        "  %n.4 = s32[] get-tuple-element(%state.4), index=0\n  %k = s32[] constant(16)\n  ROOT %t",
    )
    assert text != LOOPS
    with pytest.raises(ValueError, match=r"the trip count of loop .* is unknown: it depends on"):
        collectives(text)


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{1,3},{0,2}}", (1, 3)),
        ("[2,4]<=[8]", (0, 1, 2, 3)),
        ("[2,4]<=[4,2]T(1,0)", (0, 2, 4, 6)),
        ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", (0, 2, 4, 6)),
        ("mesh['a'=2,'b'=4] {'a','b':(2)2}", (0, 1, 4, 5)),
        ("mesh['b'=8] {'b':(2)2}", (0, 2)),
        ("{}", None),
    ],
)
def test_who_is_in_a_group(groups, first):
    reduced = f"%r = f32[4]{{0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    (only,) = collectives(program(f"  %x = f32[4]{{0}} parameter(0)\n  ROOT {reduced}"))
    assert only.group == first


def test_zeros_around_a_part_are_padding():
    """A device's part, put into a buffer of zeros and summed over all: a gather by other means."""
    padded = """
%pad (z: f32[8,4], p: f32[2,4], i: s32[]) -> f32[8,4] {
  %z = f32[8,4]{1,0} parameter(0)
  %p = f32[2,4]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[8,4]{1,0} dynamic-update-slice(%z, %p, %i, %i)
}
"""
    body = """
  %x = f32[8,4]{1,0} parameter(0)
  %n = s32[] partition-id()
  %mine = f32[2,4]{1,0} slice(%x), slice={[0:2], [0:4]}
  %b = f32[8,4]{1,0} fusion(%x, %mine, %n), kind=kLoop, calls=%pad
  %c = bf16[8,4]{1,0} convert(%b)
  %whole = bf16[8,4]{1,0} all-reduce(%c), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %sum = f32[8,4]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add"""
    text = program(body).replace("ENTRY", padded.lstrip() + "\nENTRY", 1)
    gathered, summed = collectives(text)
    assert (gathered.padding, summed.padding) == (6 * 4 * 4, 0)  # of the buffer as it was filled
    found = traffic([gathered, summed])["all-reduce"]
    assert (found.executions, found.synchronous, found.padded, found.padding) == (2, 2, 1, 96)


def test_real_programs_on_eight_devices():
    mesh = auto_mesh(a=2, b=4)
    spec = PartitionSpec(("a", "b"))

    @partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def exchange(x):
        def inner(x, _):
            return jax.lax.ppermute(x, "a", [(0, 1), (1, 0)]), None

        def outer(x, _):
            x, _ = jax.lax.scan(inner, x, length=5)
            return jax.lax.psum(jnp.sin(x), "a"), None

        x, _ = jax.lax.scan(outer, x, length=3)
        gathered = jax.lax.all_gather(x, "b", tiled=True)
        scattered = jax.lax.psum_scatter(jnp.cos(gathered), "b", tiled=True)
        return jax.lax.all_to_all(scattered.reshape(4, -1), "b", 0, 0).reshape(x.shape)

    with jax.set_mesh(mesh):
        text = jax.jit(exchange).lower(jnp.zeros((8 * 12, 5))).compile().as_text()
    found = traffic(collectives(text))
    size = 12 * 5 * 4
    counted = {kind: (moved.executions, moved.bytes) for kind, moved in found.items()}
    assert counted["all-reduce"] == (3, 3 * size)
    assert counted["collective-permute"] == (15, 15 * size)
    assert counted["all-gather"] == (1, 4 * size)
    assert counted["reduce-scatter"] == (1, 4 * size)
    assert found["all-to-all"].bytes == size


def step_collectives(architecture, variant, devices=None, **mesh):
    """Those of the train step of a small model, 3 steps deep and T = 12; and the bytes of one
    device's part of its gradient, with that of a table that is also the head twice."""
    config = default.get_config()
    config.model.update(architecture=architecture, vocab_size=256, num_steps=3, time_embed_dim=12)
    config.model.update(embed_dim=64, num_heads=4, mlp_dim=128, num_frequencies=8)
    config.data.sequence_length = 32
    config.mesh.update(mesh)
    setup = setup_of(default.set_variant(copy.deepcopy(config), variant), 256, devices)
    with setup.context():
        found = collectives(lower_train_step(setup, 16).compile().as_text())
    params = setup.abstract_state.params
    twice = params["token_embedding"] if setup.model.config.has_tied_head else {}
    leaves = jax.tree.leaves((params, twice))
    return found, sum(4 * prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def crosses_data(collective, num_devices=8):
    """Whether its groups have devices of both halves, as where `data` is the first axis and 2."""
    sides = {device < num_devices // 2 for device in collective.group or range(num_devices)}
    return len(sides) == 2


def select(found, predicate):
    """The part of the collectives for which `predicate(collective, shape)` holds.

    Of a combined collective, the shapes for which it does.
    """
    parts = (replace(c, shapes=tuple(s for s in c.shapes if predicate(c, s))) for c in found)
    return [c for c in parts if c.shapes]


def is_time_embedding_sum(collective, shape):
    """Whether it is of the sums over shards that the gradient of e(t) takes."""
    dims = tuple(dim for dim in shape.dims if dim != 1)
    return collective.kind in ("all-reduce", "reduce-scatter") and dims in ((3, 12), (36,))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["llama", "gpt"])
@pytest.mark.parametrize("mesh", [{"fsdp": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_an_ode_moves_no_more_than_its_baseline(architecture, mesh):
    """P, its gradient and its moments stay where they are: only sums for e(t) come on top.

    Over `data`, which crosses slices and nodes, only shards of the weights' gradient travel.
    """
    leaves = {"llama": 9, "gpt": 12}[architecture]  # of the block, each made by a P
    ode, _ = step_collectives(architecture, "ode", **mesh)
    sums = select(ode, is_time_embedding_sum)
    assert {c.kind for c in sums} == {"all-reduce"}
    assert 0 < sum(c.bytes for c in sums) <= leaves * 3 * 12 * 4
    rest = traffic(select(ode, lambda c, shape: not is_time_embedding_sum(c, shape)))
    baseline, shards = step_collectives(architecture, "baseline", **mesh)
    base = traffic(baseline)
    for kind in KINDS:
        assert rest[kind].bytes <= 1.01 * base[kind].bytes, kind
    if "data" in mesh:
        for found in (ode, baseline):
            assert 0 < sum(c.bytes for c in found if crosses_data(c)) <= 1.1 * shards


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
@pytest.mark.parametrize("slices", [1, 2])
def test_no_gradient_travels_whole_on_tpus(slices):
    """Between two slices, or over `data` within one, only shards of the gradient travel."""
    devices, data = make_topology("v5e:2x4", slices).devices, 2 * slices  # 2 within each slice
    _, shards = step_collectives("llama", "baseline", devices, data=data)
    shards //= slices  # the chips of a slice with the same part send a share of it each
    for variant in ("ode", "baseline"):
        found, _ = step_collectives("llama", variant, devices, data=data)
        across = [
            c
            for c in found
            if (c.kind == BETWEEN_SLICES if slices == 2 else crosses_data(c, len(devices)))
        ]
        moved = sum(c.bytes for c in across)
        assert 0.5 * shards < moved <= 1.1 * shards, variant
