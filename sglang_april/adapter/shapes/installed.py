"""The shape of the installed SGLang, which its manifest names."""

from sglang_april.adapter import versions
from sglang_april.adapter.shapes.interface import Shape

shape: Shape = versions.load_shape(versions.installed()["shape"])
