# SPDX-License-Identifier: Apache-2.0
"""What a user sets: four ``CompilationConfig`` fields and ``additional_config``.

Both are read and checked once, at start-up; every error names the option, the
value received and the remedy.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_encoder_cg.logger import init_logger

logger = init_logger(__name__)

BUDGETS_FIELD = "encoder_cudagraph_token_budgets"
ITEMS_FIELD = "encoder_cudagraph_max_vision_items_per_batch"
FRAMES_FIELD = "encoder_cudagraph_max_frames_per_batch"
"""Of vLLM's ``CompilationConfig``."""

_KEY = "encoder_cg"
_PREFIX = f"additional_config.{_KEY}"
_NEAR_KEY = 0.9
"""Likeness, as ``difflib`` has it, from which a key can only be a slip of ours."""


def _option(default: Any, description: str, accepts: str, **constraints: Any) -> Any:
    """A settings field; `accepts` completes "use ..." in error messages."""
    return Field(
        default,
        description=description,
        json_schema_extra={"accepts": accepts},
        **constraints,
    )


class SettingError(ValueError):
    """Something that the user set is wrong, and the start ends; the message names the
    field, the value and what would be right."""


class EncoderCgSettings(BaseModel):
    """Options under ``additional_config={"encoder_cg": {...}}``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    ladder: Literal["fine", "power_of_two"] = _option(
        "fine",
        "How automatic token budgets are spaced. Both contain the power-of-two "
        'levels; "fine" adds budgets between them, so that less is padded.',
        '"fine" or "power_of_two"',
    )
    max_graphs: int = _option(
        64,
        "Most graphs that the automatic budgets of one path may lead to. The "
        "power-of-two levels are captured even where they alone are more.",
        "an integer of at least 1",
        ge=1,
    )
    memory_limit_gib: float | None = _option(
        3.9,
        "Most GPU memory, in GiB, that encoder graphs and their buffers may take "
        "together; what would exceed it is not captured. null: no limit.",
        "a number above 0, or null for no limit",
        gt=0,
        allow_inf_nan=False,
    )
    self_check: bool = _option(
        True,
        "Compare a sample of the captured graphs, both ends of each ladder and some "
        "evenly spread between them, with the model's eager forward before any may "
        "serve. Where only vLLM's protocol describes the model, each graph is compared "
        "at its first use.",
        "true or false",
    )
    on_mismatch: Literal["drop", "raise"] = _option(
        "drop",
        'What follows a failed self-check: "drop" leaves the graph out, so that '
        'its items run eagerly; "raise" stops the start-up.',
        '"drop" or "raise"',
    )
    log_every_items: int = _option(
        1000,
        "Log a line of statistics each time this many further images and videos "
        "have been encoded. 0: only at shutdown.",
        "an integer of at least 0",
        ge=0,
    )
    cost_model: bool = _option(
        True,
        "Measure replays and eager forwards at start-up and plan by the measured "
        "times. false: pack greedily and replay whatever fits a graph.",
        "true or false",
    )
    cost_file: str | None = _option(
        None,
        "A file with measured times: read at start-up instead of measuring where it "
        "is of this encoder, GPU and version, and written after measuring where there "
        "is none (if it cannot be written, a warning says so). `vllm-encoder-cg plan` "
        "reads it, too. On a CPU nothing is measured, "
        "so the file is neither read nor written. null: always measured.",
        "a path, such as /var/cache/encoder-costs.json, or null",
        min_length=1,
    )

    trace_file: str | None = _option(
        None,
        "Record the modality and token counts of each batch, and nothing else of it, "
        "as JSON lines; `vllm-encoder-cg plan` proposes budgets from them. Each "
        "process writes a file of its own, with its number before the suffix: "
        "trace.1234.jsonl for trace.jsonl. null: nothing is recorded.",
        "a path in a folder that exists, such as /tmp/trace.jsonl, or null",
        min_length=1,
    )
    trace_max_mib: int = _option(
        16,
        "Size in MiB that a trace file does not exceed; recording ends there. One "
        "MiB holds about 20000 batches of one image.",
        "an integer of at least 1",
        ge=1,
    )

    fused: Literal["auto", "on", "off"] = _option(
        "auto",
        "Whether graphs hold a forward of this plug-in's own, which runs the same "
        'weights in fewer kernels, where there is one for the model. "auto": where it '
        "is right and faster than vLLM's forward by graph, as measured at start-up; "
        '"on": wherever there is one; "off": nowhere.',
        '"auto", "on" or "off"',
    )

    @classmethod
    def from_additional_config(cls, additional_config: Any) -> EncoderCgSettings:
        """Reads ``additional_config["encoder_cg"]``; without it, the defaults.

        Args:
            additional_config: vLLM's field of that name.  None, and objects other
                than mappings (vLLM accepts those for platforms), hold no options.

        Raises:
            SettingError: an unknown option, or a value that an option refuses, or
                either beside ``"encoder_cg"`` instead of under it; all faults in one
                message.
        """
        if not isinstance(additional_config, Mapping):
            return cls()
        faults = _misplaced(additional_config)
        options = additional_config.get(_KEY)
        if options is None:
            options = {}
        if not isinstance(options, Mapping):
            raise SettingError(
                f"{_PREFIX}: got {options!r}; use an object of options, such as "
                '{"ladder": "fine"}'
            )
        faults += [
            _unknown_option(name, value)
            for name, value in options.items()
            if name not in cls.model_fields
        ]
        known = {n: v for n, v in options.items() if n in cls.model_fields}
        try:
            settings = cls(**known)
        except ValidationError as error:
            # One line per option: unions report one error per member.
            names = dict.fromkeys(str(e["loc"][0]) for e in error.errors())
            faults += [_refused_value(name, known[name]) for name in names]
        if faults:
            raise SettingError("\n".join(faults))
        return settings


def _misplaced(additional_config: Mapping[Any, Any]) -> list[str]:
    """What lies beside our key in `additional_config` and was meant to be under it.

    Other keys are those of other plug-ins and platforms, and nobody else tells a
    user that ours would do nothing.
    """
    faults = []
    for key, value in additional_config.items():
        if key in EncoderCgSettings.model_fields:
            faults.append(
                f"additional_config.{key}: got {value!r}, an option of vllm-encoder-cg "
                f'outside of "{_KEY}"; put it there: {{"{_KEY}": {{"{key}": ...}}}}'
            )
        elif key != _KEY and _is_like_ours(key):
            faults.append(
                f"additional_config.{key}: unknown key, got {value!r}; did you mean "
                f"{_KEY!r}?"
            )
    return faults


def _is_like_ours(key: Any) -> bool:
    letters = "".join(filter(str.isalnum, str(key).lower())).removeprefix("vllm")
    ours = _KEY.replace("_", "")
    return difflib.SequenceMatcher(None, letters, ours).ratio() >= _NEAR_KEY


def _unknown_option(name: Any, value: Any) -> str:
    known = list(EncoderCgSettings.model_fields)
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"{_PREFIX}.{name}: unknown option, got {value!r}; {hint}"
        f"known options are {', '.join(known)}"
    )


def _refused_value(name: str, value: Any) -> str:
    extra = EncoderCgSettings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    return f"{_PREFIX}.{name}: got {value!r}; use {extra['accepts']}"


@dataclass(frozen=True)
class CompilationFields:
    """The ``CompilationConfig`` fields that limit encoder graphs.

    Raises:
        SettingError: the item limit is above what the smallest budget holds.
    """

    token_budgets: tuple[int, ...] = ()
    """Ascending, without duplicates; empty: inferred."""

    max_items: int = 0
    """0: inferred."""

    max_frames: int | None = None
    """None: inferred."""

    def __post_init__(self) -> None:
        budgets = self.token_budgets
        if budgets and self.max_items > budgets[0]:
            raise SettingError(
                f"{ITEMS_FIELD}: got {self.max_items}, more than the smallest of "
                f"{BUDGETS_FIELD} {list(budgets)}, which leaves less than one token "
                f"per item; use at most {budgets[0]}, or larger budgets"
            )

    @classmethod
    def from_compilation_config(cls, compilation_config: Any) -> CompilationFields:
        """Reads the fields of `compilation_config` (any object that has them; an
        absent one counts as vLLM's default), and checks ``cudagraph_mm_encoder``,
        by which vLLM decides whether there is a manager.

        Raises:
            SettingError: a field has a value of the wrong kind or range, or one does
                not fit another.
        """
        enabled = getattr(compilation_config, "cudagraph_mm_encoder", False)
        if not isinstance(enabled, bool):
            raise SettingError(
                f"cudagraph_mm_encoder: got {enabled!r}; use true to capture encoder "
                "graphs or false not to"
            )
        items = getattr(compilation_config, ITEMS_FIELD, None)
        items = _count(ITEMS_FIELD, 0 if items is None else items, "0 to infer it")
        frames = getattr(compilation_config, FRAMES_FIELD, None)
        if frames is not None:
            otherwise = "0 for images only, or leave it out to infer it"
            frames = _count(FRAMES_FIELD, frames, otherwise)
        return cls(
            token_budgets=_read_budgets(compilation_config),
            max_items=items,
            max_frames=frames,
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _count(name: str, value: Any, otherwise: str) -> int:
    if not _is_int(value) or value < 0:
        raise SettingError(
            f"{name}: got {value!r}; use a positive integer, or {otherwise}"
        )
    return int(value)


def _read_budgets(compilation_config: Any) -> tuple[int, ...]:
    name = BUDGETS_FIELD
    given = getattr(compilation_config, name, None)
    if given is None:
        return ()
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise SettingError(
            f"{name}: got {given!r}; use a list of positive integers, or leave it "
            "out to infer budgets from the model"
        )
    budgets = list(given)
    for budget in budgets:
        if not _is_int(budget) or budget <= 0:
            raise SettingError(
                f"{name}: got {budget!r} in {budgets!r}; every budget is a number "
                "of output tokens, a positive integer"
            )
    return tuple(sorted(set(budgets)))


def warn_of_duplicates(compilation_config: Any) -> None:
    """Says which budgets of the user's list are there twice, and so left out."""
    given = list(getattr(compilation_config, BUDGETS_FIELD, None) or ())
    unique = sorted(set(given))
    if len(unique) < len(given):
        logger.warning(
            "%s: duplicates of %s are left out; budgets are %s",
            BUDGETS_FIELD,
            [budget for budget in unique if given.count(budget) > 1],
            unique,
        )
