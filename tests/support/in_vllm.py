"""Run where vLLM is, by vllm_test.py: FOLDER... continue a prompt as JSON says that they should.

    python in_vllm.py FOLDER...

Beside each FOLDER stands FOLDER.json, `{"prompt": tokens, "continued": tokens}`.
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's processes import this file
    for folder in map(Path, sys.argv[1:]):
        said = json.loads(folder.with_suffix(".json").read_text())
        wanted = said["continued"]
        engine = LLM(
            str(folder),
            trust_remote_code=True,
            model_impl="transformers",
            dtype="float32",
            enforce_eager=True,
            max_model_len=len(said["prompt"]) + len(wanted),
            max_num_seqs=2,
        )
        greedy = SamplingParams(temperature=0, max_tokens=len(wanted), ignore_eos=True)
        (answer,) = engine.generate([{"prompt_token_ids": said["prompt"]}], greedy)
        assert answer.outputs[0].token_ids == wanted, (folder, answer.outputs[0].token_ids, wanted)
        print(f"{folder.name}: agrees")
