"""Run where torch and transformers are, by transformers_test.py: what the library offers any model.

    python in_transformers_features.py FOLDER...

Each FOLDER holds an exported model of our own class. `output_hidden_states`, resized embeddings,
initialisation, saving and the rest are tested by the library's own suite (see docs/huggingface.md).
"""

import sys
import tempfile

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.modeling_outputs import CausalLMOutputWithPast

CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
TOLERANCE = {"atol": 1e-4, "rtol": 0}


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **options).eval()


def padded_batch(model):
    """Two rows, of which the first begins with three tokens of padding."""
    tokens = torch.arange(18).reshape(2, 9) * 7 % model.config.vocab_size
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def check_backends(folder, model):
    """Attention of each backend that the CPU has, and of one that is registered as vLLM's is."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as BACKENDS

    batch, real = padded_batch(model), padded_batch(model)["attention_mask"].bool()
    expected = model(**batch).logits[real]
    called = []

    def engine(module, *arguments, scaling, **options):
        """Returns `[L, H * G]`, without the axis of rows, as vLLM 0.32 does."""
        called.append(module.layer_idx)
        mixed, _ = BACKENDS["sdpa"](module, *arguments, scaling=scaling, **options)
        return mixed.flatten(2)[0], None

    BACKENDS["engine"] = engine
    flex = (
        () if CACHE == "past_key_values" else ("flex_attention",)
    )  # 4.53's own fails in torch 2.13
    for backend in ("eager", "sdpa", *flex, "engine"):
        if backend == "engine":
            other = load(folder)
            other.config._attn_implementation = backend
            said = other(batch["input_ids"][1:]).logits
            torch.testing.assert_close(said, model(batch["input_ids"][1:]).logits, **TOLERANCE)
            assert called == list(range(model.config.num_hidden_layers))
            continue
        other = load(folder, attn_implementation=backend)
        torch.testing.assert_close(other(**batch).logits[real], expected, **TOLERANCE)
    weights = load(folder, attn_implementation="eager")(**batch, output_attentions=True).attentions
    assert len(weights) == model.config.num_hidden_layers
    torch.testing.assert_close(weights[0].sum(-1)[1], torch.ones_like(weights[0][1, :, :, 0]))


def check_generation(model):
    """A row padded on the left continues as it does alone; beams with a cache as without."""
    batch = padded_batch(model)
    most = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(**batch, **most)
    alone = model.generate(batch["input_ids"][:1, 3:], **most)
    assert together[0, 9:].tolist() == alone[0, 6:].tolist()
    for options in ({"num_beams": 3}, {}, {"cache_implementation": "static"}):
        cached = model.generate(**batch, **most, **options)
        plain = {k: v for k, v in options.items() if k != "cache_implementation"}
        recomputed = model.generate(**batch, **most, **plain, use_cache=False)
        assert cached.tolist() == recomputed.tolist(), options
    assisted = model.generate(batch["input_ids"][:1, 3:], assistant_model=model, **most)
    assert assisted.tolist() == alone.tolist()


def check_training(folder, model):
    """Gradients with checkpointing are those without; half a batch counts as half of it."""
    batch = {**padded_batch(model), "labels": padded_batch(model)["input_ids"]}
    gradients = []
    for checkpointing in (False, True):
        trained = load(folder).train()
        if checkpointing:
            trained.gradient_checkpointing_enable({"use_reentrant": False})
        loss = trained(**batch).loss
        loss.backward()
        gradients.append([parameter.grad for parameter in trained.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    halves = [{name: rows[n : n + 1] for name, rows in batch.items()} for n in (0, 1)]
    parts = [model(**half, num_items_in_batch=torch.tensor(16)).loss for half in halves]
    torch.testing.assert_close(sum(parts), loss.detach(), **TOLERANCE)


def check_compiled(model):
    """The compiled model computes the same, in one graph."""
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = padded_batch(model)
    torch.testing.assert_close(
        compiled(**batch, use_cache=False).logits, model(**batch).logits, **TOLERANCE
    )


def check_again(folder, model):
    """Saved again, with more tokens, loaded on a device map, in 16 bits, and without the head."""
    batch = padded_batch(model)
    expected = model(**batch).logits
    rows = model.config.vocab_size
    with tempfile.TemporaryDirectory() as saved:
        larger = load(folder)
        larger.resize_token_embeddings(rows + 5)
        larger.save_pretrained(saved)
        again = load(saved, device_map="cpu")
        torch.testing.assert_close(again(**batch).logits[..., :rows], expected, **TOLERANCE)
        narrow = load(saved, torch_dtype=torch.bfloat16)(**batch).logits[..., :rows]
        assert (narrow.float() - expected).norm() < 0.03 * expected.norm()
    base = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    states = base(**batch, output_hidden_states=True)
    assert len(states.hidden_states) == model.config.num_hidden_layers + 1
    torch.testing.assert_close(model.lm_head(states.last_hidden_state), expected, **TOLERANCE)
    tied = model.lm_head.weight is model.model.token_embedding.weight
    assert tied == model.config.tie_word_embeddings


def check_pipeline(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generate = pipeline("text-generation", load(folder), tokenizer=tokenizer)
    (said,) = generate("line 7", max_new_tokens=4, do_sample=False)
    assert said["generated_text"].startswith("line 7")


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        torch.manual_seed(0)
        model = load(folder)
        with torch.no_grad():
            check_backends(folder, model)
            check_generation(model)
            check_compiled(model)
            check_again(folder, model)
        check_training(folder, model)
        check_pipeline(folder)
        print(f"{folder}: agrees")
