"""Which views the compiled kernel reads."""

from typing import TYPE_CHECKING

from kvquant_hf.ops.cpu.build import ELEMENT_KINDS

if TYPE_CHECKING:
    from kvquant_hf.spec import QuantSpec
    from kvquant_hf.view import KVView

_MAX_DIM = 256


def unsupported(view: "KVView") -> str | None:
    """Why the kernel cannot read a view, or `None` if it can."""
    if "cpu" in view.memo:
        return None
    return obstacle(view)


def obstacle(view: "KVView") -> str | None:
    """Like `unsupported`, without looking whether the view has been read before."""
    key, value = view.key_store.spec, view.value_store.spec
    if view.device.type != "cpu":
        return f"tensors on {view.device.type}"
    if view.key_dtype != view.value_dtype or view.key_dtype not in ELEMENT_KINDS:
        return f"keys in {view.key_dtype} and values in {view.value_dtype}"
    for spec in (key, value):
        if spec.is_quantized and (reason := _unread_codes(spec)) is not None:
            return reason
    if value.is_quantized and value.granularity == "per_channel" and value.promotes:
        return "values per_channel with promoted channels"
    head_dim, value_dim = view.key_shape[3], view.value_shape[3]
    if head_dim % 16 or value_dim % 16 or max(head_dim, value_dim) > _MAX_DIM:
        return f"head sizes {head_dim} and {value_dim} (multiples of 16 up to {_MAX_DIM})"
    if view.block_length % 16:
        return f"blocks of {view.block_length} tokens (multiples of 16)"
    return None


def _unread_codes(spec: "QuantSpec") -> str | None:
    """What codes are that the kernel cannot make numbers of."""
    if spec.method == "turboquant_prod":
        return "`method: turboquant_prod`"
    if spec.centered:
        return "`centered` groups"
    if spec.shares:
        return "groups that share a parameter (`shared_groups`)"
    # A zero point of 8 bits takes tables and a list, a scale one power of two or a conversion.
    if spec.has_second_level and not spec.symmetric:
        return "`metadata_nbits=8` but of symmetric codes"
    return None
