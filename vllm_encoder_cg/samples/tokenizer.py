# SPDX-License-Identifier: Apache-2.0
"""Builds the tokenizer files of a sample checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from vllm_encoder_cg.samples.definition import (
    BASE_TOKENS,
    PAD,
    TURN_END,
    TURN_START,
    VOCAB_SIZE,
    Json,
)


def special_token_ids(special_tokens: Sequence[str]) -> dict[str, int]:
    """The ids of the special tokens: the last ones of the vocabulary."""
    tokens = list(dict.fromkeys((*BASE_TOKENS, *special_tokens)))
    first = VOCAB_SIZE - len(tokens)
    return {token: first + index for index, token in enumerate(tokens)}


def write_tokenizer(
    directory: Path,
    special_tokens: Sequence[str],
    image_placeholder: str,
    video_placeholder: str | None,
    options: Json,
) -> None:
    """Write a byte-level tokenizer of ``VOCAB_SIZE`` tokens and a chat template.

    Every byte is a token, so any text can be encoded; syllables fill the rest of
    the vocabulary, so that any id decodes to text. Special tokens come last.

    Args:
        directory: where ``tokenizer.json``, ``tokenizer_config.json`` and
            ``chat_template.jinja`` go.
        special_tokens: tokens beside ``BASE_TOKENS``.
        image_placeholder: what the chat template writes for an image.
        video_placeholder: what it writes for a video; None leaves videos out.
        options: entries that override those of ``tokenizer_config.json``.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    specials = special_token_ids(special_tokens)
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = product(("Ġ", ""), "bdfghjklmnprstvwz", "aeiou", ("", "n"))
    words += map("".join, syllables)
    vocabulary = {word: i for i, word in enumerate(words[: min(specials.values())])}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    tokenizer.save(str(directory / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": PAD,
        "eos_token": TURN_END,
        "model_max_length": 32768,
        "clean_up_tokenization_spaces": False,
        **options,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    template = _chat_template(image_placeholder, video_placeholder)
    (directory / "chat_template.jinja").write_text(template)


def _chat_template(image_placeholder: str, video_placeholder: str | None) -> str:
    parts = [("image", image_placeholder)]
    if video_placeholder is not None:
        parts.append(("video", video_placeholder))
    branches = "".join(
        f"{{%- elif part['type'] == '{kind}' -%}}{{{{- {text!r} -}}}}"
        for kind, text in parts
    )
    return (
        "{%- for message in messages -%}"
        f"{{{{- '{TURN_START}' + message['role'] + '\\n' -}}}}"
        "{%- if message['content'] is string -%}{{- message['content'] -}}"
        "{%- else -%}{%- for part in message['content'] -%}"
        "{%- if part['type'] == 'text' -%}{{- part['text'] -}}"
        f"{branches}{{%- endif -%}}{{%- endfor -%}}{{%- endif -%}}"
        f"{{{{- '{TURN_END}\\n' -}}}}"
        "{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- '{TURN_START}assistant\\n' -}}}}"
        "{%- endif -%}"
    )
