"""Prefixes that come back from the host arena: the same tokens as `generate`, by real attention over real bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halocline.model.host_pages import HostPages
from testing.models import FAMILIES
from testing.serving import Setting, differences, generated, serve, told_apart

SETTING = Setting(page_tokens="2 full, 16 local", arena="small", admission="expected", cache="hot", host="ample")
"""All requests come twice, through an arena that cannot keep what they leave."""


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama4", "gpt-oss"])
def test_tokens_are_generates_where_prefixes_are_loaded_from_the_host(family: str) -> None:
    """Full attention alone, sliding windows, chunked ones, and sinks."""
    pages = "1" if family in ("llama", "gpt-oss") else SETTING.page_tokens
    setting = replace(SETTING, page_tokens=pages, dtype=FAMILIES[family].dtype)
    outcome = serve(family, setting)
    for tokens in outcome.rounds:
        assert differences(generated(family, setting.dtype), tokens) == []
    assert outcome.cache is not None
    assert outcome.cache.tier is not None
    assert outcome.cache.tier.loads > 0, "nothing was loaded, so nothing is shown"
    assert outcome.cache.tier.hit_tokens > 0


@pytest.mark.parametrize("lost", ["offload", "load"])
def test_prefixes_that_were_not_copied_are_found_out(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The instrument itself."""
    monkeypatch.setattr(HostPages, lost, lambda self, work: None)
    assert told_apart("gemma3", replace(SETTING, dtype=FAMILIES["gemma3"].dtype))
