"""Left padding of a batch: found from what Transformers passes along, and kept out of sinks and ranges."""

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


def repeated_padding(padding: torch.Tensor, num_rows: int, device: torch.device) -> torch.Tensor:
    """Padding of the rows that `generate` makes of a prompt's, which it repeats for beams and returned sequences.

    Args:
        padding: `[B]`, int64.
        num_rows: A multiple of `B`.
        device: Where the result goes.

    Returns:
        `[num_rows]`, int64.

    Raises:
        ValueError: It is no multiple.
    """
    repeats, rest = divmod(num_rows, padding.numel())
    if rest or not repeats:
        raise ValueError(f"The padding given covers {padding.numel()} rows, `key_states` has {num_rows}.")
    return padding.to(device).repeat_interleave(repeats)


def fill_row_sinks(sinks: torch.Tensor, states: torch.Tensor, padding: torch.Tensor, first: int) -> None:
    """Copy the new tokens that are among the first real ones of their row.

    Args:
        sinks: `[B, H, S, D]`, filled in place: slot `padding[r] + i` of row `r` goes to `sinks[r, :, i]`.
        states: New tokens `[B, H, t, D]`.
        padding: `[B]`, int64.
        first: Slot of the first new token.
    """
    tokens = states.shape[2]
    if not tokens:
        return
    wanted = padding[:, None] + torch.arange(sinks.shape[2], device=padding.device) - first  # [B, S]
    arrived = ((wanted >= 0) & (wanted < tokens))[:, None, :, None]
    index = wanted.clamp(0, tokens - 1)[:, None, :, None].expand_as(sinks)
    sinks.copy_(torch.where(arrived, states.gather(2, index), sinks))


def without_padding(blocks: torch.Tensor, slot: int, padding: torch.Tensor, num_sinks: int) -> torch.Tensor:
    """Blocks in which padding and the sinks of padded rows repeat the first token after them.

    Ranges are fitted to the result, so that tokens nobody reads from the blocks do not widen them. A row of a block
    that holds nothing else is left as it is.

    Args:
        blocks: `[B, H, n, L, D]`.
        slot: Slot of the first token of the first block.
        padding: `[B]`, int64.
        num_sinks: Sinks of a row.

    Returns:
        `[B, H, n, L, D]`.
    """
    count, length = blocks.shape[2:4]
    skipped = torch.where(padding > 0, padding + num_sinks, 0)
    starts = slot + length * torch.arange(count, device=blocks.device)
    skipped = (skipped[:, None] - starts).clamp(0, length)  # [B, n]: leading tokens to leave out
    skipped = torch.where(skipped == length, 0, skipped)
    source = torch.maximum(torch.arange(length, device=blocks.device), skipped[..., None])  # [B, n, L]
    return blocks.gather(3, source[:, None, :, :, None].expand_as(blocks))
