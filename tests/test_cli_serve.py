"""What a person may get wrong with `trsi serve`: one line, exit code 2; what a run serves."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rollout.errors import UserError
from rollout.harness import shell_chat
from trsi_jax import checkpoint, config, model
from trsi_jax.serve import load as serve_load

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no directory nowhere"),
        (["tests", "--dtype", "int8"], "--dtype int8: must be float32 or bfloat16"),
        (["tests", "--port", "70000"], "--port"),
    ],
)
def test_a_wrong_model_or_option_is_one_line_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trsi_jax.cli.main", "serve", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_a_mistake_of_the_person() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "trsi_jax.cli.main", "serve", "tests"),
                *("--port", str(taken.getsockname()[1])),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Address already in use" in done.stderr


def test_a_directory_that_is_no_model_and_no_run_says_what_is_wanted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.toml of a run and no config\.json"):
        serve_load.load(tmp_path)


def test_a_run_serves_the_stage_that_is_asked_for(tmp_path: Path) -> None:
    settings = config.load(ROOT / "configs" / "tiny.toml", [])
    (tmp_path / "config.toml").write_text(config.dump(settings))
    with pytest.raises(UserError, match="no stage is finished"):
        serve_load.load(tmp_path)
    chat = shell_chat(["ls", "cat"])
    chat.tokenizer.save(tmp_path / "tokenizer")
    architecture = model.preset("tiny", vocab_size=chat.tokenizer.vocab_size)
    pairs = {}
    for index, name in enumerate(("base", "rsr-1")):
        actor = model.init_params(architecture, jax.random.key(index))
        pairs[name] = {"actor": actor}
        checkpoint.save(tmp_path / "checkpoints" / name, 0, pairs[name])
    newest = serve_load.load(tmp_path)
    assert (newest.name, newest.context) == ("tiny-rsr-1", settings.engine.context)
    assert newest.stop_ids == chat.stop_ids
    for named in (
        serve_load.load(tmp_path, stage="base"),
        serve_load.load(tmp_path / "checkpoints" / "base"),
    ):
        assert named.name == "tiny-base"
        jax.tree.map(np.testing.assert_array_equal, named.params, pairs["base"]["actor"])
    with pytest.raises(UserError, match="no checkpoint of stage 'rpr-9'; finished: base, rsr-1"):
        serve_load.load(tmp_path, stage="rpr-9")
