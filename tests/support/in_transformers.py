"""Run where torch and transformers are, by transformers_test.py: FOLDER says the same as we do.

FOLDER holds exported models, `MODEL/`, and beside each what ours said of it, `MODEL.json`.
"""

import json
import sys
from copy import deepcopy
from dataclasses import fields
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast

TOLERANCE = 1e-4
DISTINCT = 1e-3  # two best logits that differ by less may change places
OUTPUTS = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in OUTPUTS else "past_key_values"  # its name in this version


def check(folder: Path) -> None:
    said = json.loads(folder.with_suffix(".json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert type(model).__name__ == said["class"], type(model)
    if (folder / "adapter").exists():
        model = PeftModel.from_pretrained(model, folder / "adapter")
    tokens = torch.tensor(said["tokens"])
    with torch.no_grad():
        worst = check_logits(model, tokens, torch.tensor(said["logits"]))
        check_padding(model, tokens)
        check_static_cache(model, tokens)
        check_16_bits(model, tokens)
        for prompt, expected in zip(said["prompts"], said["continued"], strict=True):
            check_greedy(model, prompt, expected)
    check_tokenizer(folder, said)
    print(f"{folder.name}: {said['class']} agrees, logits to {worst:.1e}")


def check_logits(model, tokens, expected):
    whole = model(tokens, labels=tokens)
    worst = (whole.logits - expected).abs().max().item()
    assert worst < TOLERANCE, worst
    loss = -expected[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).mean()
    assert abs(whole.loss - loss) < TOLERANCE
    assert isinstance(model(tokens, return_dict=False), tuple)
    return worst


def check_padding(model, tokens):
    """A row that is padded on the left says what it says alone."""
    alone = model(tokens[:1, 3:]).logits
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    padded = model(tokens, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))
    torch.testing.assert_close(padded.logits[:1, 3:], alone, atol=TOLERANCE, rtol=0)
    if type(model).__module__.endswith("modeling_diffeq"):
        counted = model(tokens, attention_mask=mask)
        torch.testing.assert_close(counted.logits, padded.logits)


def check_static_cache(model, tokens):
    cache = StaticCache(config=model.config, max_batch_size=2, max_cache_len=tokens.shape[1])
    before = model(tokens[:, :5], **{CACHE: cache})
    after = model(tokens[:, 5:9], **{CACHE: before[CACHE]}, use_cache=True)
    whole = model(tokens[:, :9], use_cache=False)
    torch.testing.assert_close(after.logits, whole.logits[:, 5:], atol=TOLERANCE, rtol=0)


def check_16_bits(model, tokens):
    """Loaded in 16 bits, our own class keeps the state in float32."""
    if not type(model).__module__.endswith("modeling_diffeq"):
        return
    narrow, states = deepcopy(model).to(torch.bfloat16), set()
    for step in narrow.model.steps:
        step.register_forward_pre_hook(lambda _, inputs: states.add(inputs[0].dtype))
    logits, expected = narrow(tokens).logits, model(tokens).logits
    assert (states, logits.dtype) == ({torch.float32}, torch.bfloat16)
    assert (logits.float() - expected).norm() < 0.03 * expected.norm()


def check_greedy(model, prompt, expected):
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=len(expected),
        eos_token_id=None,
        do_sample=False,
        use_cache=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    found = made.sequences[0, len(prompt) :].tolist()
    for step, (ours, theirs) in enumerate(zip(expected, found, strict=True)):
        best, second = made.scores[step][0].topk(2).values.tolist()
        if best - second <= DISTINCT:
            break
        assert ours == theirs, (step, expected, found)
    else:
        step += 1
    assert step >= len(expected) // 2, "the best logits are too close to compare"


def check_tokenizer(folder, said):
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    for text, ids in said["texts"].items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids, text
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text, text
    if said["end_of_text"] is not None:
        assert tokenizer.eos_token_id == said["end_of_text"]


if __name__ == "__main__":
    folders = sorted(path for path in Path(sys.argv[1]).iterdir() if path.is_dir())
    for folder in folders:
        check(folder)
    assert folders
