"""Triton's interpreter, without the 40% of its time that go into patching its language.

It does so at each launch, and again whenever a kernel calls a function. In a process that only
interprets, once is enough.
"""

from __future__ import annotations

from types import FunctionType

from triton.runtime import interpreter


def patch_language_once() -> None:
    """For a process in which no kernel is compiled."""
    patch, patched = interpreter._patch_lang, set[FunctionType]()

    def patch_new(function: FunctionType) -> interpreter._LangPatchScope:
        if function not in patched:
            patched.add(function)
            patch(function)
        return interpreter._LangPatchScope()  # restores nothing

    interpreter._patch_lang = patch_new
