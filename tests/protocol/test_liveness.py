"""Heartbeats: any traffic counts, three misses, our own pauses are forgiven once."""

from vram_conductor.protocol.liveness import Liveness

MS = 1_000_000


def run_until_dead(live: Liveness, start_ms: int, step_ms: int, most_ms: int = 100_000) -> int:
    """Ask every ``step_ms``; the time of the verdict."""
    for now_ms in range(start_ms, most_ms, step_ms):
        if live.dead(now_ms * MS):
            return now_ms
    raise AssertionError("never dead")


def test_three_silent_intervals_mean_dead() -> None:
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    assert run_until_dead(live, 0, 100) == 3000


def test_any_traffic_starts_the_count_again() -> None:
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    for now_ms in range(0, 10_000, 500):
        assert not live.dead(now_ms * MS)
        live.heard(now_ms * MS)
    assert live.silent_ms(10_000 * MS) == 500
    assert run_until_dead(live, 10_000, 100) == 12_500


def test_an_idle_side_pings_once_per_interval() -> None:
    live = Liveness(0, heartbeat_ms=1000)
    pings = 0
    for now_ms in range(0, 10_000, 10):
        live.heard(now_ms * MS)
        pings += live.ping_due(now_ms * MS)
    assert pings == 9


def test_a_side_that_only_listens_still_pings() -> None:
    """A long stream with unlimited credit: the client hears much and says nothing."""
    live = Liveness(0, heartbeat_ms=1000)
    live.heard(999 * MS)
    assert live.ping_due(1000 * MS)


def test_a_side_that_only_talks_asks_for_an_answer() -> None:
    live = Liveness(0, heartbeat_ms=1000)
    pings = 0
    for now_ms in range(0, 3000, 100):
        live.sent(now_ms * MS)
        pings += live.ping_due(now_ms * MS)
    assert pings == 2


def test_no_ping_while_both_talk() -> None:
    live = Liveness(0, heartbeat_ms=1000)
    for now_ms in range(0, 10_000, 500):
        live.sent(now_ms * MS)
        live.heard(now_ms * MS)
        assert not live.ping_due(now_ms * MS)


def test_the_side_that_bound_never_pings() -> None:
    live = Liveness(0, heartbeat_ms=1000, pings=False)
    assert not live.ping_due(10**15)


def test_a_pause_of_our_own_is_forgiven_once() -> None:
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    assert not live.dead(100 * MS)
    # Stopped for a minute; the peer's messages are still in the socket.
    assert not live.dead(60_000 * MS)
    assert run_until_dead(live, 60_100, 100) == 61_000
    # A caller that always asks too rarely gets its verdict, too.
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    assert run_until_dead(live, 5000, 5000) == 10_000


def test_a_forgiven_peer_that_speaks_is_whole_again() -> None:
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    assert not live.dead(60_000 * MS)
    live.heard(60_010 * MS)
    assert run_until_dead(live, 60_100, 10) == 63_010
    assert not Liveness(0, heartbeat_ms=1000).dead(0)


def test_following_next_ns_meets_every_duty() -> None:
    """A poll loop that sleeps until ``next_ns`` pings in time, finds death in time, never spins."""
    live = Liveness(0, heartbeat_ms=1000, missed_max=3)
    now_ns = 0
    pings: list[int] = []
    rounds = 0
    while not live.dead(now_ns):
        if live.ping_due(now_ns):
            pings.append(now_ns // MS)
        assert live.next_ns() > now_ns
        now_ns, rounds = live.next_ns(), rounds + 1
    assert now_ns == 3000 * MS
    assert pings == [1000, 2000]
    assert rounds < 10
    assert live.ping_due(now_ns)
    assert live.next_ns() > now_ns
