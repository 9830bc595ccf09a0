"""Makes the acpfs to which this file belongs importable, and nothing else of the environment in
which it is installed.

Carried out by the packages below `site` before they import anything of acpfs: `PYTHONPATH=$(acpfs
mindio-path)` serves an interpreter in which acpfs is not installed, such as one that has MindSpore.
"""

import importlib.util
import sys
from pathlib import Path

NAME = "acpfs"


def take_this_one() -> None:
    """Import the package, by its place.

    Raises:
        ImportError: another acpfs is imported already.
    """
    place = Path(__file__).resolve().parents[1]
    known = sys.modules.get(NAME)
    if known is not None:
        if Path(str(known.__file__)).resolve().parent != place:
            raise ImportError(
                f"the path of `acpfs mindio-path` belongs to {place}, and {known.__file__} is "
                "imported already"
            )
        return
    spec = importlib.util.spec_from_file_location(
        NAME, place / "__init__.py", submodule_search_locations=[str(place)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)


take_this_one()
