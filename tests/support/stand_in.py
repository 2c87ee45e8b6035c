"""Stands in for a program of a cloud or a cluster: records its arguments, answers as it was told.

Linked under the program's name. $STAND_INS holds `rules.json`, a list of

    {"call": regular expression, found in the program's name and arguments,
     "times": how often the rule holds (default: always),
     "status": 0, "out": "", "error": "",
     "keep": a folder to copy the files among the arguments to}

of which the first that holds is used; with none, the call does nothing and succeeds. `calls.jsonl`
takes every call.
"""

import fcntl
import json
import os
import re
import shutil
import sys
from pathlib import Path


def main() -> int:
    folder = Path(os.environ["STAND_INS"])
    call = [Path(sys.argv[0]).name, *sys.argv[1:]]
    with open(folder / "calls.jsonl", "a") as calls:
        fcntl.flock(calls, fcntl.LOCK_EX)
        calls.write(json.dumps(call) + "\n")
        rule = next_rule(folder, " ".join(call))
    for path in filter(os.path.isfile, sys.argv[1:] if "keep" in rule else ()):
        shutil.copy(path, rule["keep"])
    sys.stdout.write(rule.get("out", ""))
    sys.stderr.write(rule.get("error", ""))
    return rule.get("status", 0)


def next_rule(folder: Path, call: str) -> dict:
    """The first rule that holds; counts it."""
    rules = json.loads((folder / "rules.json").read_text())
    for rule in rules:
        if rule.get("times", 1) > 0 and re.search(rule["call"], call, re.DOTALL):
            if "times" in rule:
                rule["times"] -= 1
                (folder / "rules.json").write_text(json.dumps(rules))
            return rule
    return {}


if __name__ == "__main__":
    sys.exit(main())
