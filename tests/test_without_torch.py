"""Where the C++ kernels run, neither torch nor transformers is imported: they take more memory than all else."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import tiny_text_checkpoint
from engines import tiny_text_engine

from hybridtrt.plugins.native.library import load_library
from hybridtrt.runtime.client import EngineClient
from hybridtrt.runtime.request import SamplingParams
from hybridtrt.runtime.submission import Submission

FAMILY = "qwen3_next"
REPORT = """
names = ("torch", "transformers", "llguidance", "jinja2")
print(json.dumps([name for name in names if name in sys.modules]))
"""
COMMANDS = f"""
import json, sys
from hybridtrt.cli import main
for arguments in json.loads(sys.argv[1]):
    assert main(arguments) == 0, arguments
{REPORT}
"""
PROCESS = f"""
import json, sys
from hybridtrt.runtime.engine_process import main
assert main(sys.argv[1:]) == 0
{REPORT}
"""


@pytest.fixture(scope="module")
def engine() -> Path:
    try:
        load_library()
    except ValueError as error:
        pytest.skip(str(error))
    return tiny_text_engine(FAMILY)


def imported(*commands: list[str]) -> list[str]:
    """The modules that were imported at the end of a process that ran the commands."""
    asked = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_commands_without_torch(engine: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def main():\n    return 1\n" * 4)
    model = tiny_text_checkpoint(FAMILY)
    checkpoint = engine.with_name(engine.name.replace("-engine", "-checkpoint"))
    assert (
        imported(
            ["generate", str(engine), "--prompt", "def main():", "--max-tokens", "4", "--top-k", "3"],
            ["bench", str(engine), "--prompt", "8", "--new", "2", "--profile"],
            ["eval", str(engine), "--text", str(text)],
            ["routing", str(engine), "--text", str(text), "--html", str(tmp_path / "page.html")],
            ["profile", str(engine), "--requests", "8"],
            *(["inspect", str(folder)] for folder in (engine, checkpoint, model)),
            ["plan", str(model), "--gpus", "2"],
        )
        == []
    )
    assert imported(["generate", str(engine), "--prompt", "a", "--max-tokens", "4", "--regex", "[a-z]+"]) == [
        "llguidance"
    ]


def test_the_engine_process_without_torch(engine: Path, tmp_path: Path) -> None:
    socket = tmp_path / "engine.sock"
    asked = [sys.executable, "-c", PROCESS, "--engine", str(engine), "--socket", str(socket)]
    process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
    client = EngineClient(socket)
    try:
        client.wait_ready(60)
        params = SamplingParams(max_tokens=4)
        for given in ({"text": "def main():"}, {"messages": '[{"role": "user", "content": "a"}]'}):
            replies = list(client.stream(Submission(client.new_id(), sampling=params, **given), timeout=60))
            assert replies[-1].finish_reason is not None
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    finally:
        client.close()
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert json.loads(output.splitlines()[-1]) == ["jinja2"]
