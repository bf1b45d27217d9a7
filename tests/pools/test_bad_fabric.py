"""Messages that arrive damaged, twice, late or never: the right tokens, or a typed error, and no block lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kv_transfer.transport import MessageHeader
from tandem.config import TransportName
from tandem.errors import HandoffFailed
from tests.fakes import Fault
from tests.legs import Legs
from tests.pair import Pair, PairOptions, make_prompt, monolithic, running_pair, until

TRANSPORTS: list[TransportName] = ["shm", "ucx"]
PROMPT = make_prompt(75)
OTHER = make_prompt(44, seed=1)
LEASE_S = 1.5


class Faults:
    """Gives `fault` to the messages of which `chosen` says so, and remembers all of them."""

    def __init__(self, fault: Fault, chosen: Callable[[int], bool]) -> None:
        self._fault = fault
        self._chosen = chosen
        self.seen: list[MessageHeader] = []

    def __call__(self, header: MessageHeader, index: int) -> Fault:
        self.seen.append(header)
        return self._fault if self._chosen(index) else Fault.NONE

    def num_repeated(self) -> int:
        """Messages that were sent more than once."""
        ranges = [(h.handoff_id, h.layer, h.first_block) for h in self.seen]
        return len(ranges) - len(set(ranges))


async def tokens_over(model: Path, transport: TransportName, faults: Faults) -> list[int]:
    async with running_pair(model, PairOptions(transport=transport, faults=faults, lease_s=LEASE_S)) as pair:
        return await pair.run(PROMPT, max_tokens=8)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("index", [0, 4, 8])
def test_a_damaged_message_is_sent_again(gqa: Path, transport: TransportName, index: int) -> None:
    faults = Faults(Fault.CORRUPT, lambda i: i == index)
    assert asyncio.run(tokens_over(gqa, transport, faults)) == monolithic(gqa, PROMPT, max_tokens=8)
    assert faults.num_repeated() == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("index", [0, 8])
def test_a_lost_message_is_sent_again(gqa: Path, transport: TransportName, index: int) -> None:
    faults = Faults(Fault.DROP, lambda i: i == index)
    assert asyncio.run(tokens_over(gqa, transport, faults)) == monolithic(gqa, PROMPT, max_tokens=8)
    assert faults.num_repeated() == 1


@pytest.mark.parametrize("index", [7, 8])
def test_a_message_that_was_lost_keeps_its_digest_where_only_some_have_one(gqa: Path, index: int) -> None:
    faults = Faults(Fault.DROP, lambda i: i == index)
    options = PairOptions(faults=faults, lease_s=LEASE_S, digest_every=2)

    async def lossy() -> list[int]:
        async with running_pair(gqa, options) as pair:
            return await pair.run(PROMPT, max_tokens=8)

    assert asyncio.run(lossy()) == monolithic(gqa, PROMPT, max_tokens=8)
    lost, again = faults.seen[index], faults.seen[-1]
    assert (again.layer, again.first_block, again.digest) == (lost.layer, lost.first_block, lost.digest)


def test_a_message_that_was_damaged_is_checked_again_where_only_some_are(gqa: Path) -> None:
    options = PairOptions(
        faults=lambda header, _: Fault.CORRUPT if (header.layer, header.first_block) == (0, 0) else Fault.NONE,
        lease_s=LEASE_S,
        digest_every=1000,
    )

    async def damaged() -> None:
        async with running_pair(gqa, options) as pair:
            with pytest.raises(HandoffFailed, match="layer 0 could not be sent"):
                await pair.run(PROMPT, max_tokens=8)

    asyncio.run(damaged())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_that_come_twice_change_nothing(gqa: Path, transport: TransportName) -> None:
    faults = Faults(Fault.DUPLICATE, lambda i: True)
    assert asyncio.run(tokens_over(gqa, transport, faults)) == monolithic(gqa, PROMPT, max_tokens=8)
    assert faults.num_repeated() == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_that_come_after_the_record_complete_the_handoff(gqa: Path, transport: TransportName) -> None:
    faults = Faults(Fault.DELAY, lambda i: i in (2, 5, 8))

    async def late() -> list[int]:
        async with running_pair(gqa, PairOptions(transport=transport, faults=faults, lease_s=LEASE_S)) as pair:
            legs = await Legs(pair, PROMPT, max_tokens=8).open()
            await legs.prefill.seen("first_token")
            await until(lambda: pair.fabric.num_held == 3)
            assert len(pair.decode.receiver) == 1
            assert pair.decode.num_iterations == 0
            pair.fabric.release()
            assert await legs.errors() == (None, None)
            return legs.tokens()

    assert asyncio.run(late()) == monolithic(gqa, PROMPT, max_tokens=8)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("fault", [Fault.CORRUPT, Fault.DROP])
def test_a_message_that_never_arrives_whole_fails_the_request_and_nothing_else(
    gqa: Path, transport: TransportName, fault: Fault
) -> None:
    victims: set[str] = set()

    def policy(header: MessageHeader, index: int) -> Fault:
        return fault if header.handoff_id in victims and header.layer == 1 else Fault.NONE

    async def fails(pair: Pair) -> None:
        legs = Legs(pair, PROMPT, max_tokens=8)
        victims.add(legs.handoff_id)
        bystander = asyncio.create_task(pair.run(OTHER, max_tokens=20))
        await legs.open()
        errors = await legs.errors()
        assert [type(error) for error in errors] == [HandoffFailed, HandoffFailed]
        assert all(error is not None and "layer 1" in error.message for error in errors)
        assert await bystander == monolithic(gqa, OTHER, max_tokens=20)
        await pair.settled()
        assert await pair.run(PROMPT, max_tokens=8) == monolithic(gqa, PROMPT, max_tokens=8)

    async def with_pair() -> None:
        async with running_pair(gqa, PairOptions(transport=transport, faults=policy, lease_s=LEASE_S)) as pair:
            await fails(pair)

    asyncio.run(with_pair())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_link_that_broke_is_opened_anew_for_the_next_request(gqa: Path, transport: TransportName) -> None:
    async def broken() -> None:
        async with running_pair(gqa, PairOptions(transport=transport)) as pair:
            assert await pair.run(OTHER) == monolithic(gqa, OTHER)
            link, _ = await pair.prefill.links.get(
                pair.decode.worker_id, pair.decode.transport.address(), epoch=pair.decode_view.epoch
            )
            link.close()
            with pytest.raises(HandoffFailed, match="could not be sent"):
                await pair.run(PROMPT)
            await pair.settled()
            assert await pair.run(PROMPT) == monolithic(gqa, PROMPT)

    asyncio.run(broken())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_send_that_hangs_after_an_abort_is_fenced_within_a_lease(gqa: Path, transport: TransportName) -> None:
    victims: set[str] = set()

    def policy(header: MessageHeader, index: int) -> Fault:
        return Fault.DELAY if header.handoff_id in victims else Fault.NONE

    async def hangs() -> None:
        async with running_pair(gqa, PairOptions(transport=transport, faults=policy, lease_s=LEASE_S)) as pair:
            legs = Legs(pair, PROMPT)
            victims.add(legs.handoff_id)
            await legs.open()
            await until(lambda: pair.fabric.num_held > 0)
            legs.decode.close()
            await pair.settled()
            assert pair.fabric.num_held == 0
            assert await pair.run(PROMPT) == monolithic(gqa, PROMPT)

    asyncio.run(hangs())
