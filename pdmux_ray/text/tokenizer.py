"""The model's tokenizer and chat template. Importing this module imports neither transformers nor torch; `load` does."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdmux_ray.errors import ConfigError, RequestError
from pdmux_ray.model.context import context_length, prefixes_are_shareable
from pdmux_ray.types import ModelFacts

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import tokenizers
    from transformers import PreTrainedTokenizerFast


class Tokenizer:
    """Text to token ids and back, for one model directory. Stateless after loading: any thread may use it."""

    def __init__(self, hf: PreTrainedTokenizerFast, facts: ModelFacts) -> None:
        self._hf = hf
        self.backend: tokenizers.Tokenizer = hf.backend_tokenizer
        self.facts = facts  # of the model it belongs to

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Reads tokenizer, chat template, config.json and generation_config.json. No code of the model's is ever run.

        Whoever needs only the facts loads the tokenizer, too: its class may be all that names the end token.
        Raises ConfigError.
        """
        from transformers import AutoConfig, AutoTokenizer

        if not (model_dir / "config.json").is_file():
            raise ConfigError(f"{model_dir} has no config.json")
        options = {"local_files_only": True, "trust_remote_code": False}
        try:
            config = AutoConfig.from_pretrained(str(model_dir), **options)
            hf = AutoTokenizer.from_pretrained(str(model_dir), **options)
            eos = _eos_token_ids(model_dir, config.eos_token_id, hf.eos_token_id)
            facts = ModelFacts(context_length(config), int(config.vocab_size), eos, prefixes_are_shareable(config))
        except (OSError, ValueError, LookupError, AttributeError) as error:
            raise ConfigError(f"cannot load the tokenizer in {model_dir}: {error}") from error
        if not hf.is_fast:
            raise ConfigError(f"{model_dir} has no fast tokenizer (tokenizer.json); only fast tokenizers are supported")
        loaded = cls(hf, facts)
        # Made here, so that no request waits for it.
        log.debug("the bytes of %d tokens are known", len(loaded.shown_bytes or ()))
        return loaded

    @property
    def has_chat_template(self) -> bool:
        return self._hf.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """With the special tokens the model puts around plain text (such as a leading bos). Raises RequestError."""
        return self._encode(text, special=True, param="prompt")

    def chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, continue_final: bool = False
    ) -> list[int]:
        """Messages through the model's chat template, in transformers' sandbox.

        `continue_final`: the last message is left open, for the model to go on with; it excludes a generation prompt.
        Raises RequestError: no template, or the template refuses the messages (with the template's own words).
        """
        import jinja2

        if not self.has_chat_template:
            raise RequestError("This model has no chat template. Use /v1/completions with a plain prompt.", param="messages")
        if continue_final and add_generation_prompt:
            raise RequestError("Use either a generation prompt or the continuation of the final message, not both.")
        try:
            text = self._hf.apply_chat_template(
                [dict(m) for m in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"The chat template refuses these messages: {error}", param="messages") from error
        return self._encode(text, special=False, param="messages")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens included; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, exactly. b"" for an id that the tokenizer does not know."""
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if token_id in self._added:
            return piece.encode()
        if "ByteLevel" in self._decoders:
            return b"".join(_BYTE_OF_CHAR.get(char, char.encode()) for char in piece)
        if "ByteFallback" in self._decoders and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    @cached_property
    def shown_bytes(self) -> Mapping[int, bytes] | None:
        """Token id -> the bytes that it adds to `decode`'s text. None when that is not all there is to decoding.

        The first access takes about a microsecond per token of the vocabulary.
        """
        if self._decoders != {"ByteLevel"}:
            return None
        special = {token for token, added in self.backend.get_added_tokens_decoder().items() if added.special}
        return {token: b"" if token in special else self.token_bytes(token) for token in self.backend.get_vocab().values()}

    def _encode(self, text: str, special: bool, param: str) -> list[int]:
        """Raises RequestError."""
        try:
            # A batch of one, because `encode` would hold the interpreter lock until it is done: a second for megabytes of text.
            return list(self.backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)
        except (UnicodeEncodeError, TypeError) as error:
            message = "The text is not valid Unicode: half of a surrogate pair (\\ud800 to \\udfff) stands alone in it."
            raise RequestError(message, param) from error

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset(self.backend.get_added_tokens_decoder())

    @cached_property
    def _decoders(self) -> frozenset[str]:
        """The steps of the tokenizer's decoder, by type name."""
        if self.backend.decoder is None:
            return frozenset()
        state = json.loads(self.backend.decoder.__getstate__())
        return frozenset(step["type"] for step in state.get("decoders", [state]))


def _byte_of_char() -> dict[str, bytes]:
    """Byte-level tokenizers write each byte as one printable character: this is the way back.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, are U+0100, U+0101 …
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in plain]
    return {chr(b): bytes([b]) for b in plain} | {chr(0x100 + i): bytes([b]) for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()


def _eos_token_ids(model_dir: Path, *also: int | list[int] | None) -> frozenset[int]:
    """Every end-of-sequence id that generation_config.json or `also` names (an int, a list, or none)."""
    path = model_dir / "generation_config.json"
    try:
        named = (json.loads(path.read_text(encoding="utf-8")).get("eos_token_id"), *also) if path.is_file() else also
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return frozenset(i for value in named if value is not None for i in (value if isinstance(value, list) else [value]))
