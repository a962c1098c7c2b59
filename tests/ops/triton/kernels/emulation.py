"""Makes Triton's interpreter compute what a GPU computes: PTX instructions, rounding, and no silent bf16 mistakes.

`install()` comes before the first kernel is compiled and after `TRITON_INTERPRET=1` is set. Only for tests.
"""

import dataclasses
import re

import numpy as np


def _halves(words: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(words).view(np.float16)


def _words(halves: np.ndarray) -> np.ndarray:
    return halves.astype(np.float16).view(np.int32)


def _wide(words: np.ndarray) -> np.ndarray:
    return _halves(words).astype(np.float64)


def _negated_product(z: np.ndarray, w: np.ndarray) -> np.ndarray:
    return -(_wide(z) * _wide(w)).astype(np.float16).astype(np.float64)


def _bytes_picked(selector: int, words: np.ndarray) -> np.ndarray:
    picked = words.view(np.uint8).reshape(*words.shape, 4)
    places = [(selector >> (4 * i)) & 0xF for i in range(4)]
    return np.ascontiguousarray(picked[..., places]).view(np.int32).reshape(words.shape)


# Instructions by their text. Sums of float16 products fit float64 exactly, so that rounding happens once.
INSTRUCTIONS = {
    "lop3.b32 $0, $1, $2, $3, 0xEA;": lambda x, mask, bits: (x & mask) | bits,
    "sub.rn.f16x2 $0, $1, $2;": lambda x, y: _words(_wide(x) - _wide(y)),
    "mul.rn.f16x2 $0, $1, $2;": lambda x, y: _words(_wide(x) * _wide(y)),
    "fma.rn.f16x2 $0, $1, $2, $3;": lambda x, y, z: _words(_wide(x) * _wide(y) + _wide(z)),
    "{ .reg .b32 t; mul.rn.f16x2 t, $3, $4; neg.f16x2 t, t; fma.rn.f16x2 $0, $1, $2, t; }": lambda x, y, z, w: _words(
        _wide(x) * _wide(y) + _negated_product(z, w)
    ),
    "prmt.b32 $0, $1, $1, 0x1010;": lambda x: _bytes_picked(0x1010, x),
    "prmt.b32 $0, $1, $1, 0x3232;": lambda x: _bytes_picked(0x3232, x),
}


def install() -> None:
    """Patch the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    if getattr(interpreter, "_emulation_installed", False):
        return
    interpreter._emulation_installed = True
    builder = interpreter.InterpreterBuilder

    patch_tensor = interpreter._patch_lang_tensor

    def with_index(tensor, scope):
        # Triton 3.6 calls int() on arrays of one element, which numpy 2.4 refuses.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).reshape(-1)[0]))

    interpreter._patch_lang_tensor = with_index

    binary = builder.binary_op

    def checked_binary(self, left, right, operation):
        if tl.bfloat16 in (left.dtype.scalar, right.dtype.scalar):
            raise TypeError("bfloat16 arithmetic is wrong in the interpreter: cast to float32 first")
        return binary(self, left, right, operation)

    builder.binary_op = checked_binary

    def fused(self, x, y, z):
        wide = [part.data.astype(np.float64) for part in (x, y, z)]
        return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(x.data.dtype), x.dtype)

    builder.create_fma = fused

    convert = builder.create_fp_to_fp if hasattr(builder, "create_fp_to_fp") else None
    cast = builder.cast_impl

    def rounding_cast(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            bits = src.data.view(np.uint32).astype(np.uint64)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return interpreter.TensorHandle(rounded.astype(np.uint16), dst_type.scalar)
        return cast(self, src, dst_type)

    builder.cast_impl = rounding_cast
    builder.create_fp_trunc = rounding_cast
    if convert is not None:

        def rounding_convert(self, src, dst_type, rounding_mode):
            if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
                return rounding_cast(self, src, dst_type)
            return convert(self, src, dst_type, rounding_mode)

        builder.create_fp_to_fp = rounding_convert

    def inline_asm(self, text, constraints, values, types, pure, pack):
        if text == "mov.b32 $0, $1;":  # a copy, of any type
            result = values[0].data
            element = values[0].dtype.scalar

            class Copy:
                def get_result(self, index):
                    return interpreter.TensorHandle(result, element)

            return Copy()
        assert pack == 1 and re.fullmatch(r"=r(,r)+", constraints), (constraints, pack)
        arrays = [np.ascontiguousarray(part) for part in np.broadcast_arrays(*[value.data for value in values])]
        result = INSTRUCTIONS[text](*arrays).reshape(arrays[0].shape)

        class Results:
            def get_result(self, index):
                return interpreter.TensorHandle(result, tl.int32)

        return Results()

    builder.create_inline_asm = inline_asm

    patched: set[str] = set()  # modules whose `triton.language` the present launch has patched
    launch = interpreter.GridExecutor.__call__

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def call_inlined(self, *args, **kwargs):
        # Upstream patches again for each call of a device function, which takes longer than the call.
        if self.fn.__module__ not in patched:
            patched.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call_inlined
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
