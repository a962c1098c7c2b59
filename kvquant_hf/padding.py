"""Left padding of a batch, found from what Transformers passes along."""

import torch


def padding_of_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Left padding of each row.

    Args:
        attention_mask: `[B, T]`, zero or false on padding.

    Returns:
        Leading zeros of each row, `[B]`, int64; 0 for a row without any real token.

    Raises:
        ValueError: The mask is not two-dimensional.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"`attention_mask` must have the shape [batch, tokens], got {list(attention_mask.shape)}.")
    real = attention_mask != 0
    return torch.where(real.any(1), real.long().argmax(1), 0)


def padding_of_positions(position_ids: torch.Tensor) -> torch.Tensor:
    """Left padding of each row of a prompt.

    `generate` numbers the real tokens of a row 0, 1, 2, … and gives all of its padding one same position. Only rows
    of exactly that form count as padded.

    Args:
        position_ids: `[B, T]`.

    Returns:
        `[B]`, int64.
    """
    tokens = position_ids.shape[1]
    slots = torch.arange(tokens, device=position_ids.device)
    offset = slots[-1] - position_ids[:, -1]
    numbered = torch.where(
        slots >= offset[:, None], position_ids == slots - offset[:, None], position_ids == position_ids[:, :1]
    )
    return torch.where(numbered.all(1) & (offset > 0) & (offset < tokens), offset, 0)
