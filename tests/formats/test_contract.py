"""What programs rely on is only added to; what goes is said in the changelog first."""

from __future__ import annotations

import pytest

from tests.formats.contract import contract, noted


@pytest.mark.clause("S529")
@pytest.mark.parametrize("kind", noted())
def test_nothing_that_was_there_is_gone(kind: str) -> None:
    """Whoever takes something away on purpose takes it out of contract.json, and follows the rule
    of OPERATIONS, "What changes from version to version".
    """
    assert sorted(set(noted()[kind]) - set(contract()[kind])) == []
