"""An instance that is started again takes over what its earlier boot still holds, at once."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast


def test_a_new_boot_fences_the_earlier_one_of_its_name(place: dict[str, Any]) -> None:
    with holdfast.open(**place) as store:
        session = store.session("s")
        first = session.drive("boot-1", 600, instance="planner-1")
        with pytest.raises(holdfast.SessionBusy):
            session.drive(lease_seconds=600)
        for name in ("planner-10", "planner", "planner-1 "):
            with pytest.raises(holdfast.SessionBusy):
                session.drive(lease_seconds=600, instance=name)
        with pytest.raises(holdfast.SessionBusy):
            session.drive("boot-1", 600, instance="planner-1")
        second = session.drive("boot-2", 600, instance="planner-1")
        assert second.fence == (first.fence or 0) + 1
        with pytest.raises(holdfast.LeaseLost):
            first.save(x=1)
        second.save(x=2)
        first.close()
        second.save(x=3)
        second.close()
        with pytest.raises(holdfast.InvalidArgument):
            session.drive(instance="")
