"""Evaluation texts: reading, finding a place, cutting into windows of tokens."""

from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

# The first two lines of every split of the raw WikiText distribution, in which a blank line is one space.
_WIKITEXT_HEAD = " \n = "


def load_text(path: str | Path) -> str:
    """Text of a UTF-8 file.

    A raw WikiText split (`wiki.test.raw`) becomes the string that published perplexities use: its lines joined by two
    newlines, lines of one space being empty.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not UTF-8; the file is named.
    """
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: {error}") from error
    if not text.startswith(_WIKITEXT_HEAD):
        return text.replace("\r\n", "\n")
    return "\n\n".join("" if line == " \n" else line for line in text.splitlines(keepends=True))


def locate(text: str, start: str) -> int:
    """Character at which scoring starts: an offset (`"5000"`), or the beginning of the first line that starts so.

    Raises:
        ValueError: The offset lies outside the text, or no line starts with those words.
    """
    if start.isdecimal():
        if int(start) >= len(text):
            raise ValueError(f"`start` must be less than the {len(text)} characters of the text, got {start}.")
        return int(start)
    found = 0 if text.startswith(start) else text.find("\n" + start) + 1
    if start and (found or text.startswith(start)):
        return found
    raise ValueError(f"`start` must be an offset or the beginning of a line of the text, got {start!r}.")


def token_windows(tokenizer: PreTrainedTokenizerBase, text: str, context: int, count: int) -> torch.Tensor:
    """The first `count` windows of `context` tokens of a text, one after another.

    Where the tokenizer begins a text with a special token (`<bos>` of Gemma), so does each window.

    Returns:
        `[count, context]`, int64.

    Raises:
        ValueError: The text is too short.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    bos = tokenizer.bos_token_id
    prefix = [bos] if bos is not None and tokenizer("a").input_ids[0] == bos else []
    length = context - len(prefix)
    if count < 1 or len(ids) < count * length:
        raise ValueError(
            f"`chunks` must be between 1 and {len(ids) // length} for a text of {len(ids)} tokens and windows of "
            f"{context}, got {count}."
        )
    windows = [prefix + ids[i * length : (i + 1) * length] for i in range(count)]
    return torch.tensor(windows, dtype=torch.int64)
