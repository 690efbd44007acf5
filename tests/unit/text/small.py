"""Small tokenizers made here, in the two families that models use. No model files, no torch."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdmux_ray.text import tokenizer

EOS = "<eos>"
_MERGED = ["st", "op", "stop", " s", "ab", "abc", "é", "\n\n", "the"]


class SmallTokenizer(tokenizer.Tokenizer):
    """Made of a backend alone: no chat template, no model."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.add_special_tokens([AddedToken(EOS, special=True)])
        self.backend = backend

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)


def byte_level(*, by_library: bool = False) -> SmallTokenizer:
    """GPT-2, Llama 3 and Qwen style: every byte is a token; some longer ones. `by_library`: its text only the library knows."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = ["".join(piece for piece, _ in pre.pre_tokenize_str(word)) for word in _MERGED]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces + words))}
    merges = [(w[:i], w[i:]) for w in words for i in range(1, len(w)) if w[:i] in vocab and w[i:] in vocab]
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]) if by_library else decoders.ByteLevel()
    return SmallTokenizer(backend)


def byte_fallback() -> SmallTokenizer:
    """Llama 2 and Mistral style: pieces with a mark for the space, and bytes for what is in no piece."""
    letters = ["\u2581", *"abcdehopst\n", "st", "\u2581st", "abc", "op"]
    vocab = {"<unk>": 0} | {f"<0x{b:02X}>": b + 1 for b in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(letters)}
    merges = [("s", "t"), ("\u2581", "st"), ("o", "p")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return SmallTokenizer(backend)
