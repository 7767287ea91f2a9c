# SPDX-License-Identifier: Apache-2.0
"""The command line: quick to answer, and its exit codes mean something."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.variants import AttendsAcrossImages
from vllm_encoder_cg.cli.output import write_json
from vllm_encoder_cg.cli.verify import verify
from vllm_encoder_cg.samples.media import photographs

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
KIMI = "KimiVLForConditionalGeneration"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that run in this process leave no variable to other tests."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def run(
    *arguments: str, timeout: float = 60, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vllm_encoder_cg", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env=os.environ | variables,
    )


@pytest.mark.parametrize("command", ["bench", "demo", "models", "plan", "verify"])
def test_help_is_there(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0, result.stderr
    assert "--json" in result.stdout


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_terminal_hides_no_column(columns: str) -> None:
    mix = run("plan", "--items", "300", COLUMNS=columns).stdout.split()
    assert {"proposed", "300", "100.0%", "padding", "memory"} <= set(mix)
    table = run("models", COLUMNS=columns).stdout
    row = next(line for line in table.splitlines() if "DeepseekOCR" in line)
    cells = [cell.strip() for cell in row.split("│")]
    assert cells[1:7] == ["DeepseekOCRForCausalLM", "image", "global,", "", "any", "no"]
    assert cells[7] == "adapter"


@pytest.mark.parametrize("arguments", [("models",), ("models", "--json", "-")])
def test_a_standard_output_that_was_closed_is_no_error(
    arguments: tuple[str, ...],
) -> None:
    """As a service manager may start it; only the exit code is wanted then."""
    command = [sys.executable, "-m", "vllm_encoder_cg", *arguments]
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_a_full_disk_behind_standard_output_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "vllm_encoder_cg", "models"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "No space left on device" in line


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path: Path) -> None:
    """The error of a graph that makes NaN is infinite, which is no JSON."""
    results = {"cases": [{"error": math.inf, "tokens": 3}], "times": (math.nan, 1.5)}
    file = tmp_path / "results.json"
    write_json(file, results)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    assert json.loads(file.read_text(), parse_constant=refuse) == {
        "cases": [{"error": None, "tokens": 3}],
        "times": [None, 1.5],
    }


@pytest.mark.parametrize(("option", "value"), [("--max-tokens", "0"), ("--seed", "-1")])
def test_the_demo_refuses_a_number_before_it_starts_an_engine(
    option: str, value: str
) -> None:
    result = run("demo", option, value)
    assert result.returncode == 2
    assert option in result.stderr and "Traceback" not in result.stderr


def test_help_names_the_commands_and_loads_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from vllm_encoder_cg.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    for command in ("bench", "demo", "models", "plan", "verify"):
        assert command in result.stdout


def test_version() -> None:
    from vllm_encoder_cg import __version__

    result = run("--version")
    assert result.returncode == 0 and __version__ in result.stdout


def test_models_as_json() -> None:
    result = run("models", "--json", "-")
    models = json.loads(result.stdout)
    assert ARCHITECTURE in [model["architecture"] for model in models["models"]]
    assert result.stderr.count(f"{ARCHITECTURE} ") == 1
    assert run("models").stdout.count(f"{ARCHITECTURE} ") == 1


def test_tables_are_as_wide_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "210")
    assert max(map(len, run("models").stdout.splitlines())) > 150


@pytest.mark.parametrize("command", ["bench", "demo", "models", "plan", "verify"])
def test_results_that_cannot_be_written_are_refused_first(
    command: str, tmp_path: Path
) -> None:
    result = run(command, "--json", str(tmp_path / "none" / "x.json"))
    assert result.returncode == 2
    assert result.stderr.startswith("vllm-encoder-cg: json: there is no folder")
    assert len(result.stderr.splitlines()) == 1
    result = run(command, "--json", str(tmp_path))
    assert "is a folder" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --model CHECKPOINT"),
        (("--model", "a", "--architecture", "b"), "give either --model CHECKPOINT"),
        (("--architecture", "b"), "there is no sample of 'b'"),
        (("--architecture", ARCHITECTURE, "--items", "12"), "items: got '12'"),
        (("--architecture", ARCHITECTURE, "--budgets", "1,x"), "budgets: got '1,x'"),
        (("--architecture", ARCHITECTURE, "--tolerance", "nan"), "'--tolerance'"),
        (("--architecture", ARCHITECTURE, "--tolerance", "-1"), "'--tolerance'"),
        (("--architecture", ARCHITECTURE, "--max-tokens", "0"), "'--max-tokens'"),
        (("--architecture", ARCHITECTURE, "--batches", "-1"), "'--batches'"),
        (
            ("--architecture", KIMI, "--items", "64x64,video:16x448x448"),
            "items: got video:16x448x448, and graphs of KimiVL",
        ),
    ],
)
def test_wrong_arguments_of_verify(arguments: tuple[str, ...], message: str) -> None:
    result = run("verify", *arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": ARCHITECTURE, "budgets": "16,0"}, "must be positive"),
        ({"architecture": ARCHITECTURE, "dtype": "int8"}, "dtype: got 'int8'; "),
        (
            {"architecture": ARCHITECTURE, "backend": "NONE_SUCH"},
            "backend: got 'NONE_SUCH'; ",
        ),
        ({"model": "/no/such/folder"}, "model: there is no folder /no/such/folder"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_no_difference(
    arguments: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 says that an encoder differs."""
    with pytest.raises(SystemExit) as end:
        verify(**arguments, items="64x64")
    assert end.value.code == 2
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if "encoder-cg: " in line
    ]
    assert message in line


def test_verify_of_what_no_graph_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        verify(
            architecture=ARCHITECTURE, items="512x512", budgets="16,64", json=Path("-")
        )
    assert end.value.code == 2
    output, others = capsys.readouterr()
    results = json.loads(output)
    problem = "no item went through a graph: above every budget"
    assert (results["ok"], results["problems"]) == (False, [problem])
    assert "eager: above" in others and problem in others


def test_verify_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    verify(
        architecture=ARCHITECTURE,
        items="64x64*2,video:4x64x64",
        budgets="16,64",
        batches=0,
        json=file,
    )
    results = json.loads(file.read_text())
    assert results["ok"] and results["problems"] == []
    assert results["architecture"] == ARCHITECTURE
    (case,) = results["cases"]
    assert (case["hits"], case["eager"], case["budgets"]) == (3, 0, [16, 16])
    assert case["error"] < 1e-4


def test_verify_fails_where_the_encoder_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def adapt(model: Any, vllm_config: Any) -> Any:
        return AttendsAcrossImages(model, vllm_config), None

    monkeypatch.setattr("vllm_encoder_cg.manager.adapt", adapt)
    with pytest.raises(SystemExit) as end:
        verify(architecture=ARCHITECTURE, items="64x64*2", budgets="16", batches=0)
    assert end.value.code == 1


def test_demo_without_an_image_there() -> None:
    result = run("demo", "--image", "no-such-file.jpg")
    assert result.returncode == 2
    assert "no-such-file.jpg" in result.stderr


@pytest.mark.vllm_e2e
def test_demo(tmp_path: Path) -> None:
    """One photograph of the user's own, alone and with a video made from it."""
    photograph, file = tmp_path / "mine.png", tmp_path / "results.json"
    photographs()[0][1].resize((300, 200)).save(photograph)
    result = run(
        *("demo", "--image", str(photograph), "--max-tokens", "4"),
        *("--json", str(file)),
        timeout=800,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(file.read_text())
    assert results["ok"]
    assert results["statistics"]["graph_hits"] == 3
    items = [item for prompt in results["prompts"] for item in prompt["items"]]
    assert [item["pixels"] for item in items] == [
        "300x200",
        "300x200",
        "8x224x224",
    ]
    for item in items:
        assert item["error"] < 1e-4
        assert item["budget"] >= item["tokens"] + item["padding"] > item["padding"]
    for prompt in results["prompts"]:
        assert prompt["token_ids"] == prompt["token_ids_without_graphs"]
    assert "difference from eager" in result.stdout
