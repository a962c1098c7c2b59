"""Cosines and sines for the kernels, by columns of their tiles or by angle; shared by all layers of a process."""

from functools import lru_cache

import torch

from kvquant_hf.rope import KeyRotation


def columns(planes: int, words: int, padded_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`(place, is real)` of the columns (word, plane, half) of half a tile of keys, `[2 · padded_words · planes]`."""
    column = torch.arange(2 * padded_words * planes)
    word = column // (2 * planes)
    return 2 * (column // 2 % planes * words + word) + column % 2, word < words


def _in_columns(
    rotation: KeyRotation, positions: torch.Tensor, planes: int, words: int, padded_words: int
) -> torch.Tensor:
    """Cosines and sines `[n, 2, columns]`, float32; 1 and 0 where nothing is rotated."""
    place, real = columns(planes, words, padded_words)
    angle = place.to(positions.device)
    real = real.to(positions.device) & (angle < rotation.rotary_dim // 2)
    angle = torch.where(real, angle, 0)
    cos, sin = (table[:, angle] for table in rotation.tables(positions))
    return torch.stack((torch.where(real, cos, 1.0), torch.where(real, sin, 0.0)), dim=1)


@lru_cache(maxsize=16)
def offset_table(
    rotation: KeyRotation, tokens: int, planes: int, words: int, padded_words: int, device: torch.device
) -> torch.Tensor:
    """Of the offsets in a tile: pairs of float16 `[tokens, 2, columns / 2]`, int32."""
    with torch.inference_mode(False), torch.no_grad():
        positions = torch.arange(tokens, device=device)
        table = _in_columns(rotation, positions, planes, words, padded_words)
        return table.half().contiguous().view(torch.int32)


@lru_cache(maxsize=16)
def start_table(
    rotation: KeyRotation,
    first: int,
    step: int,
    count: int,
    planes: int,
    words: int,
    padded_words: int,
    device: torch.device,
) -> torch.Tensor:
    """Of the positions `first + step · n`: float32 `[count, 2, columns]`."""
    with torch.inference_mode(False), torch.no_grad():
        positions = first + step * torch.arange(count, device=device)
        return _in_columns(rotation, positions, planes, words, padded_words).contiguous()


@lru_cache(maxsize=32)
def angle_table(rotation: KeyRotation, first: int, step: int, count: int, device: torch.device) -> torch.Tensor:
    """Of the positions `first + step · n`, by angle: float32 `[count, 2, rotary_dim / 2]`."""
    with torch.inference_mode(False), torch.no_grad():
        cos, sin = rotation.tables(first + step * torch.arange(count, device=device))
        return torch.stack((cos, sin), dim=1).contiguous()


@lru_cache(maxsize=16)
def offset_angle_table(rotation: KeyRotation, tokens: int, device: torch.device) -> torch.Tensor:
    """Of the offsets in a tile, by angle: pairs of float16 `[rotary_dim / 2, 2, tokens / 2]`, int32."""
    with torch.inference_mode(False), torch.no_grad():
        table = angle_table(rotation, 0, 1, tokens, device).permute(2, 1, 0)
        return table.half().contiguous().view(torch.int32)
