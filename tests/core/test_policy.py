# Copyright 2026 The hf_saguaro authors. SPDX-License-Identifier: Apache-2.0
"""What the policy makes of measurements: fed with made-up times, it has to pick what those times favour."""

from __future__ import annotations

import pytest
import torch

from hf_saguaro import SaguaroConfig
from hf_saguaro.generation import theory
from hf_saguaro.generation.acceptance import Proposal
from hf_saguaro.generation.estimates import Acceptance, Average, Estimates, Rate, Typical
from hf_saguaro.generation.policy import Policy, RoundPlan


class Machine:
    """A pair of models on hardware with fixed times; `play` runs the policy's rounds on it.

    Args:
        step, draft_pass, row (`float`): a step of the target, a draft pass, and each further row of a verify.
        acceptance (`float`): of every draft token. `hit_rate` of the overlapped rounds hit, evenly spread.
        cores (`int`), busy (`float`): that both models share, and of these the ones that a plain step keeps busy.
    """

    def __init__(self, step=1.0, draft_pass=0.1, row=0.0, acceptance=0.7, hit_rate=0.75, can_overlap=True, cores=None,
                 busy=0.0, **config):  # fmt: skip
        self.step, self.draft_pass, self.row = step, draft_pass, row
        self.acceptance, self.hit_rate = acceptance, hit_rate
        self.estimates = Estimates()
        self.policy, self.busy = Policy(SaguaroConfig(**config), self.estimates, can_overlap, cores), busy
        self.seconds, self.tokens, self.modes, self._debt, self._hits = 0.0, 0, [], 0.0, 0.0

    def play(self, rounds):
        for _ in range(rounds):
            self._round(self.policy.plan([0], room=1000))
        return self

    def _round(self, plan):
        # A round verifies what the one before made; as these are all alike, what it makes itself will do.
        self._hits += self.hit_rate if plan.overlaps else 0.0
        was_prepared = plan.overlaps and self.modes[-1:] == ["async"]
        hit = was_prepared and self._hits >= 1
        self._hits -= hit
        passes = 0
        if plan.overlaps:
            self.estimates.tree_pass.add(self.draft_pass)
        if plan.depth and not hit and (not plan.overlaps or self.policy.draft_backs_up(plan)):
            while passes == 0 or passes < plan.depth and self.policy.pass_pays([self.acceptance] * passes):
                self.estimates.draft_pass.add(self.draft_pass)
                passes += 1
        depth = plan.depth if hit else passes
        # What a chain yields on average, carried over in whole tokens.
        self._debt += sum(self.acceptance**j for j in range(1, depth + 1))
        accepted = min(int(self._debt), depth)
        self._debt -= accepted
        verify = self.step + depth * self.row
        # The draft looks for the verdict between two passes, so beside a target it holds a round up for one at most.
        seconds = (max(verify, self.draft_pass) if plan.overlaps else verify) + passes * self.draft_pass
        proposal = Proposal(torch.zeros(1, depth, dtype=torch.long), [depth], None, [False], [hit], ["draft"],
                            [[self.acceptance] * depth])  # fmt: skip
        self.policy.saw_round(
            plan,
            proposal,
            {0: accepted},
            was_prepared=was_prepared,
            seconds=seconds,
            verify_seconds=verify,
            tokens=accepted + 1,
            cores=self.busy,
        )
        self.seconds += seconds
        self.tokens += accepted + 1
        self.modes.append(plan.execution)

    def settled(self):
        """The mode of most of the last rounds."""
        last = self.modes[len(self.modes) // 2 :]
        return max(sorted(set(last)), key=last.count)


def test_overlap_where_it_pays():
    assert Machine(draft_pass=0.15).play(100).settled() == "async"


def test_taking_turns_where_there_is_nothing_to_run_on():
    machine = Machine(draft_pass=0.02, acceptance=0.9, can_overlap=False).play(100)
    assert machine.settled() == "sync" and "async" not in machine.modes
    assert not machine.policy.may_overlap


def test_plain_decoding_where_drafting_loses():
    machine = Machine(draft_pass=1.3, acceptance=0.3, hit_rate=0.0).play(256)
    assert machine.settled() == "autoregressive"
    assert machine.tokens / machine.seconds > 0.95 / machine.step


def test_a_useless_draft_costs_under_five_percent_of_256_steps():
    for draft_pass in (0.05, 0.3, 1.0):
        machine = Machine(draft_pass=draft_pass, acceptance=0.0, hit_rate=0.2)
        while machine.tokens < 256:
            machine.play(1)
        assert machine.seconds < 1.05 * 256 * machine.step


def test_the_others_are_tried_again_at_a_small_price():
    machine = Machine(draft_pass=0.3, acceptance=0.1, hit_rate=0.1).play(1000)
    late = [mode for mode in machine.modes[200:] if mode != "autoregressive"]
    assert len(late) >= 4
    assert machine.seconds < 1.05 * machine.tokens * machine.step


def test_a_mode_that_is_nearly_as_good_is_tried_at_length():
    """A bad start of a few rounds says little where a round costs little more than it brings."""
    machine = Machine(draft_pass=0.2, acceptance=0.0, hit_rate=0.0, can_overlap=False).play(8)
    machine.acceptance, machine.modes = 0.8, []
    assert machine.play(60).settled() == "sync"


def test_tokens_are_what_rounds_are_paid_for():
    """Rounds of one and of five tokens, each of one second: three tokens a second, whatever their order."""
    rate = Rate()
    for _ in range(50):
        rate.add(1.0, 1)
        rate.add(1.0, 5)
    assert rate.value == pytest.approx(1 / 3, rel=0.05)


def test_a_change_of_the_text_is_noticed():
    """A draft that had been useless becomes good: the next try shows it."""
    machine = Machine(draft_pass=0.1, row=0.1, acceptance=0.0, hit_rate=0.1).play(400)
    assert machine.seconds < 1.05 * machine.tokens * machine.step
    machine.acceptance, machine.hit_rate, machine.modes = 0.9, 0.9, []
    assert machine.play(400).settled() in ("async", "sync")


def test_what_the_user_fixed_stays_fixed():
    for execution in ("async", "sync", "autoregressive"):
        machine = Machine(draft_pass=2.0, acceptance=0.0, execution=execution).play(50)
        assert set(machine.modes) == {execution}
    policy = Machine(draft_pass=2.0, num_assistant_tokens=5, execution="sync").play(50).policy
    assert policy.plan([0], 100).depth == 5
    assert policy.completes_chains(RoundPlan("sync", 5, [0]))


def test_no_chain_is_longer_than_what_may_still_come():
    policy = Policy(SaguaroConfig(num_assistant_tokens=5, execution="sync"), Estimates(), can_overlap=False)
    assert [policy.plan([0], room).depth for room in (1, 2, 5, 6, 7)] == [0, 1, 4, 5, 5]


def test_chains_end_where_the_drafts_doubt_makes_them_not_worth_it():
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
    for _ in range(20):
        seen.step.add(1.0)
        seen.draft_pass.add(0.3)
        for confidence, right in ((0.95, True), (0.15, False)):
            seen.saw_chain(1, int(right), [confidence], copied=False)
    assert policy.pass_pays([0.95])
    assert not policy.pass_pays([0.15])
    assert not policy.pass_pays([0.95, 0.15])


def verifies(seen, **seconds):
    for width, value in seconds.items():
        for _ in range(9):
            seen.verify_of.setdefault(int(width.removeprefix("of_")), Typical()).add(value)


def test_rows_of_a_verify_that_cost_much_shorten_what_is_verified():
    confidence = [0.6, 0.6, 0.6, 0.6]
    expected = {1.0: 4, 2.2: None, 9.0: 0}
    for seconds, count in expected.items():
        seen = Estimates()
        policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
        seen.step.add(1.0)
        verifies(seen, of_4=seconds)
        assert (
            policy.worth_verifying(confidence) == count or count is None and 0 < policy.worth_verifying(confidence) < 4
        )


def test_a_pass_has_to_pay_for_its_row_in_the_verify_too():
    for row, pays in ((0.0, True), (0.6, False)):  # a gain of 0.7 steps against 0.3 for the pass
        seen = Estimates()
        policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
        for _ in range(2):
            seen.step.add(1.0)
            seen.draft_pass.add(0.3)
        verifies(seen, of_1=1.0 + row, of_2=1.0 + 2 * row)
        assert policy.pass_pays([]) == pays


def test_a_fixed_chain_ends_early_where_a_pass_outlasts_four_steps():
    for draft_pass, goes_on in ((3.9, True), (4.1, False)):
        seen = Estimates()
        policy = Policy(SaguaroConfig(num_assistant_tokens=4, execution="sync"), seen, can_overlap=False)
        for _ in range(2):
            seen.step.add(1.0)
            seen.draft_pass.add(draft_pass)
        assert policy.pass_pays([0.01]) == goes_on


def test_whether_a_token_is_verified_depends_on_the_ones_before_it_alone():
    """Else rejection sampling would see only the tokens that the draft was sure of."""
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
    seen.step.add(1.0)
    verifies(seen, of_1=1.3, of_2=1.6, of_3=1.9)
    assert policy.worth_verifying([0.9, 0.01, 0.9]) == policy.worth_verifying([0.9, 0.01]) == 2


def test_copies_are_as_long_as_their_rows_are_worth():
    for row, count in ((0.0, 4), (0.2, 1), (0.5, 0)):  # copies are right three times in ten
        seen = Estimates()
        policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
        seen.step.add(1.0)
        verifies(seen, of_4=1.0 + 4 * row)
        assert policy.worth_copying(4) == count


def test_a_try_of_turns_drafts_though_nothing_says_that_it_pays():
    seen = Estimates()
    policy = Policy(SaguaroConfig(), seen, can_overlap=False)
    for _ in range(9):
        seen.step.add(1.0)
        seen.draft_pass.add(0.9)
    verifies(seen, of_1=5.0)
    assert policy.plan([0], 100).execution == "sync"
    assert policy.pass_pays([0.1]) and not policy.pass_pays([0.1, 0.1])
    assert policy.worth_verifying([0.1, 0.1, 0.1]) == 2


def test_verifies_are_measured_in_steps_and_tell_the_step_of_the_moment():
    seen = Estimates()
    seen.step.add(2.0)
    for _ in range(3):
        seen.saw_verify(3, 3.0)
    for _ in range(3):
        seen.saw_verify(3, 1.5)  # the machine is twice as fast now
    assert seen.step.value == pytest.approx(1.0)
    assert seen.extra_seconds(3) == pytest.approx(0.5)


def test_copies_are_short_while_nothing_is_known_of_their_cost():
    assert Policy(SaguaroConfig(), Estimates(), can_overlap=False).worth_copying(8) == 3


def test_what_lies_behind_a_rejection_tells_nothing():
    seen, short, before = Estimates(), Estimates(), Estimates().accept_rates(4)
    for _ in range(10):
        seen.saw_chain(4, 1, [0.95, 0.55, 0.55, 0.55], copied=False)
        short.saw_chain(2, 1, [0.95, 0.55], copied=False)
    after = seen.accept_rates(4)
    assert after[0] > before[0] and after[1] < before[1]
    assert after == short.accept_rates(4)
    assert seen.calibrated(0.95) > 0.9 and seen.calibrated(0.55) < 0.2


def test_two_unlucky_tokens_at_one_depth_end_no_chains():
    """Else no chain would ever go there again, and nothing would show how good that depth is."""
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
    for _ in range(20):
        seen.step.add(1.0)
        seen.draft_pass.add(0.3)
        seen.saw_chain(1, 1, [0.95], copied=False)
    for _ in range(2):
        seen.saw_chain(2, 1, [0.95, 0.95], copied=False)
    assert policy.pass_pays([0.95])
    for _ in range(20):
        seen.saw_chain(2, 1, [0.95, 0.95], copied=False)
    assert not policy.pass_pays([0.95])


@pytest.mark.parametrize(("first", "then"), [(1.5, 1.0), (1.0, 1.5)])
def test_a_machine_that_changes_its_speed_changes_no_plan(first, then):
    """Steps that were measured at one speed and verifies at another say nothing about what rows cost."""
    machine = Machine(step=first, draft_pass=0.1 * first, can_overlap=False).play(12)
    machine.step, machine.draft_pass, before = then, 0.1 * then, len(machine.modes)
    machine.play(60)
    assert machine.modes[before:].count("sync") >= 58
    assert machine.tokens > 0.95 * Machine(can_overlap=False).play(72).tokens


def test_unlucky_turns_are_tried_again_at_once():
    """Also where the overlapped mode may not be tried."""
    machine = Machine(draft_pass=0.1, acceptance=0.0, cores=2, busy=1.9).play(5)
    machine.acceptance = 0.8
    assert machine.play(40).modes[5:].count("sync") > 30


@pytest.mark.parametrize(("busy", "is_tried"), [(0.1, True), (1.9, False)])
def test_a_target_that_keeps_all_cores_busy_is_left_alone(busy, is_tried):
    modes = Machine(cores=2, busy=busy).play(30).modes
    assert ("async" in modes) == is_tried
    # A long run can afford to look, once in a while.
    assert "async" in Machine(cores=2, busy=busy).play(300).modes


def sees(policy, execution, was_prepared, seconds, hit=False, awaited=True):
    proposal = Proposal(
        torch.zeros(1, 2, dtype=torch.long), [2], None, [False], [hit], ["draft"], [[0.5, 0.5]], None, awaited
    )
    policy.saw_round(RoundPlan(execution, 0, [0]), proposal, {0: 0}, was_prepared=was_prepared, seconds=seconds,
                     verify_seconds=seconds, tokens=1.0)  # fmt: skip


def test_a_chain_left_over_from_another_mode_is_no_plain_step():
    seen = Estimates()
    sees(Policy(SaguaroConfig(), seen, can_overlap=True), "autoregressive", True, 9.0)
    assert seen.step.value is None


def test_a_verification_that_had_to_wait_for_its_chain_is_no_measure_of_the_target():
    seen = Estimates()
    policy = Policy(SaguaroConfig(num_assistant_tokens=2), seen, can_overlap=False)
    sees(policy, "sync", False, 3.0, awaited=False)
    assert seen.step_seconds() is None and not seen.token  # nothing to measure it in
    seen.step.add(1.0)
    for awaited in (False, True):
        sees(policy, "sync", False, 3.0, awaited=awaited)
        assert ("sync" in seen.verify) == (2 in seen.verify_of) == awaited
        assert seen.token["sync"].value == 3.0  # what a token costs is known either way


def test_the_first_overlapped_round_is_no_measure_of_overlap():
    """Nothing could be prepared for it, so it drafts first, and misses."""
    seen = Estimates()
    policy, believed = Policy(SaguaroConfig(), seen, can_overlap=True), seen.hit_rate.value
    seen.step.add(1.0)
    sees(policy, "async", False, 9.0)
    assert "async" not in seen.token and seen.hit_rate.value == believed
    for _ in range(2):
        sees(policy, "async", True, 1.0, hit=True)
    assert seen.token_seconds()["async"] == pytest.approx(1.0) and seen.hit_rate.value > believed
    # Its time is spent all the same.
    assert seen.lost["async"] >= 8.0 and seen.seconds == 11.0


def test_plain_steps_are_measured_now_and_then():
    """The unit of all other measurements, at under one round in a hundred."""
    modes = Machine(draft_pass=0.02, acceptance=0.9, can_overlap=False).play(1500).modes[100:]
    assert 1 <= modes.count("autoregressive") < 0.01 * len(modes)


def test_a_step_in_the_cost_of_rows_is_where_chains_end():
    """Three draft tokens cost nothing, the fourth as much as two steps."""
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
    seen.step.add(1.0)
    verifies(seen, of_2=1.0, of_3=1.0, of_4=3.0)
    assert policy.worth_verifying([0.9] * 8) == 3
    assert seen.extra_seconds(3) == 0.0 and seen.extra_seconds(4) == pytest.approx(2.0)
    assert seen.extra_seconds(1) == 0.0  # between what was measured: in a straight line
    assert seen.extra_seconds(8) == pytest.approx(4.0)  # beyond it: in proportion


def test_a_width_that_costs_more_than_the_next_stops_no_chain():
    """Two draft tokens cost as much as a step; three, which the kernels are made for, nothing."""
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="sync"), seen, can_overlap=False)
    for _ in range(2):
        seen.step.add(1.0)
        seen.draft_pass.add(0.05)
    verifies(seen, of_1=1.0, of_2=2.0, of_3=1.0, of_4=9.0)
    assert policy.pass_pays([0.9]) and policy.pass_pays([0.9, 0.9]) and not policy.pass_pays([0.9] * 3)
    assert policy.worth_verifying([0.9] * 8) == 3
    assert policy.worth_verifying([0.9] * 2) == 1  # the third is not there
    for _ in range(20):
        seen.saw_chain(4, 4, [], copied=True)
    assert policy.worth_copying(8) == 3 and policy.worth_copying(2) == 1


def test_one_slow_verify_of_a_width_is_not_believed():
    seen = Estimates()
    seen.step.add(1.0)
    verifies(seen, of_3=1.0)
    seen.verify_of[4] = Typical()
    seen.verify_of[4].add(40.0)
    assert seen.extra_seconds(4) == 0.0


def test_a_trees_depth_is_the_best_by_theorem_7():
    """A slow draft gets shallow trees, a fast one deep ones."""
    depths = {}
    for tree_pass in (0.01, 0.2, 0.9):
        seen = Estimates()
        policy = Policy(SaguaroConfig(execution="async"), seen, can_overlap=True)
        for _ in range(9):
            seen.verify.setdefault("async", Typical()).add(1.0)
            seen.tree_pass.add(tree_pass)
            seen.draft_pass.add(tree_pass)
            seen.hit_rate.add(1.0)
        depths[tree_pass] = policy.plan([0], 100).depth
    assert depths[0.01] == 8
    assert 8 > depths[0.2] > depths[0.9]


def backs_up_with_the_draft(rows, hit_rate, drafted, copied, pass_seconds):
    seen = Estimates()
    policy = Policy(SaguaroConfig(execution="async"), seen, can_overlap=True)
    seen.hit_rate = Average(hit_rate, 100.0)
    seen.drafted, seen.copied = Acceptance(drafted), Acceptance(copied)
    for _ in range(9):
        seen.verify.setdefault("async", Typical()).add(1.0)
        seen.step.add(1.0)
        seen.draft_pass.add(pass_seconds)
        seen.tree_pass.add(pass_seconds)
    return policy.draft_backs_up(RoundPlan("async", 4, list(range(rows))))


def test_theorem_17_switches_with_the_batch():
    """Large batches wait for a miss nearly every round: then a miss must cost nothing."""
    figures = dict(hit_rate=0.8, drafted=0.7, copied=0.02, pass_seconds=0.12)
    drafts = [backs_up_with_the_draft(rows, **figures) for rows in range(1, 17)]
    assert drafts[0] and not drafts[-1]
    assert drafts == sorted(drafts, reverse=True)  # one threshold
    # Copies that are as good as the draft's chains are taken at once.
    assert not backs_up_with_the_draft(2, 0.8, 0.7, 0.7, 0.12)


def test_the_threshold_is_the_formulas():
    hit, e_draft, e_copy = 0.8, theory.expected_tokens([0.7] * 4), theory.expected_tokens([0.02] * 4)
    taken = set()
    for pass_seconds in (0.02, 0.12):
        for rows in (2, 4, 8, 16):
            drafted = theory.ssd_speedup(hit, e_draft, e_draft, 5 * pass_seconds, 4 * pass_seconds, rows)
            copied = theory.ssd_speedup(hit, e_draft, e_copy, 5 * pass_seconds, 0.0, rows)
            assert backs_up_with_the_draft(rows, hit, 0.7, 0.02, pass_seconds) == (drafted >= copied)
            taken.add(drafted >= copied)
    assert taken == {True, False}


@pytest.mark.parametrize("t, expected", [(0.3, 1.19), (0.5, 1.30), (0.7, 1.41), (0.9, 1.50)])
def test_async_over_sync_at_a_hit_rate_of_seven_in_ten(t, expected):
    assert theory.async_over_sync(0.7, t, 1.0) == pytest.approx(expected, abs=0.006)


def test_theorem_7():
    # Everything prepared in time: a verify a round. Nothing prepared: ordinary speculative decoding.
    assert theory.ssd_speedup(1.0, 4.0, 1.0, 0.9, 0.5) == pytest.approx(4.0)
    assert theory.ssd_speedup(0.0, 4.0, 3.0, 0.9, 0.5) == pytest.approx(3.0 / 1.5)
    assert theory.ssd_speedup(1.0, 4.0, 1.0, 2.0, 0.5) == pytest.approx(2.0)
    # A batch waits for its slowest row.
    assert theory.ssd_speedup(0.5, 4.0, 4.0, 1.0, 1.0, rows=2) == pytest.approx(4.0 / (0.25 + 0.75 * 2))


def test_one_slow_moment_is_no_news():
    typical = Typical()
    for seconds in (1.0, 1.0, 40.0, 1.0):
        typical.add(seconds)
    assert typical.value == 1.0
