"""All targets by name."""

from __future__ import annotations

from tests.fuzz import command_targets, page_targets, policy_targets, recording_targets, survey_targets

TARGETS = {
    target.name: target
    for module in (recording_targets, survey_targets, policy_targets, command_targets, page_targets)
    for target in module.TARGETS
}
