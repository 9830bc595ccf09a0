"""Where MindSpeed-LLM imports two more names from; all others are those of `framework_ttp`."""

import sys

from acpfs.compatible.framework import get_device, get_mindio_export_version

_whole = sys.modules[__name__.rpartition(".")[0]]
globals().update({name: getattr(_whole, name) for name in _whole.__all__})
__all__ = ["get_device", "get_mindio_export_version"]
__all__ += _whole.__all__
