"""An agent and the database of its shop, explored together: whoever asks twice is paid twice.

    python examples/agent_world.py
    holdfast explore examples.agent_world:make_world --max-depth 2

Customers ask for the refund of an order, by chat and by phone. Each channel is a session of one
agent; its tool records the refund in the shop's database. Both are rolled back as one: the sessions
with what the agent remembers and has done, and the rows of the shop. The bug: within a session no
call is repeated, but another session is another conversation, and the shop does not check.
REFUNDS=global fixes it: then the call is one effect in the whole store.
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import holdfast
from holdfast.agent import Agent, Request, ScriptedModel, call
from holdfast.worlds import HoldfastSystem, SqliteSystem, World, action, explore, invariant

CHANNELS = ["chat", "phone"]
ORDERS = [1, 2]
PRICE = 20
TABLES = """
PRAGMA journal_mode = WAL;
CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT NOT NULL);
CREATE TABLE refunds (id INTEGER PRIMARY KEY, order_id INTEGER NOT NULL, euros INTEGER NOT NULL);
INSERT INTO orders VALUES (1, 'delivered'), (2, 'delivered');
"""


def make_world() -> World:
    """Create a shop and a store for agents in a new folder; closing the world removes them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agent-world-")))
        with closing(sqlite3.connect(folder / "shop.db")) as made:
            made.executescript(TABLES)
        store = stack.enter_context(holdfast.open(f"sqlite:///{folder}/agents.db"))
        for channel in CHANNELS:
            store.session(channel, agent="refunds")
        # The system of a file must be opened before this process connects to the file.
        systems = {"agent": HoldfastSystem(store), "shop": SqliteSystem(folder / "shop.db")}
        shop = sqlite3.connect(folder / "shop.db", isolation_level=None)
        stack.enter_context(closing(shop))
        world = World(systems, clients={"store": store, "shop": shop})
        world.on_close(stack.pop_all().close)
        return world


def think(request: Request) -> Any:
    """Stand in for a model: do what the last message asks for, then say so."""
    last = request.messages[-1]
    if last.role == "user":
        return call("refund", order=int(last.text.split()[-1]))
    return "Your money is on its way."


def agent_of(world: World, channel: str) -> Agent:
    """Return the agent of a channel, with its tool."""

    @holdfast.tool(dedupe="global" if os.environ.get("REFUNDS") == "global" else "session")
    def refund(order: int) -> str:
        """Refund an order."""
        world.clients["shop"].execute(
            "INSERT INTO refunds (order_id, euros) VALUES (?, ?)", (order, PRICE)
        )
        return f"refunded {PRICE} euros for order {order}"

    session = world.clients["store"].session(channel, reopen=True)
    return Agent(session, ScriptedModel(think), tools=[refund])


@action(parameters={"channel": CHANNELS, "order": ORDERS}, limit=3)
def ask(world: World, channel: str, order: int) -> str:
    """A customer asks for a refund."""
    return agent_of(world, channel).run(f"Refund order {order}").text


@action(parameters={"order": ORDERS})
def return_goods(world: World, order: int) -> None:
    """The courier brings an order back."""
    world.clients["shop"].execute("UPDATE orders SET state = 'returned' WHERE id = ?", (order,))


@invariant(severity="critical")
def no_order_is_refunded_twice(world: World) -> None:
    """No refund exceeds the price."""
    found = world.clients["shop"].execute(
        "SELECT order_id, sum(euros) FROM refunds GROUP BY order_id"
    )
    for order, euros in found.fetchall():
        assert euros <= PRICE, f"order {order} of {PRICE} euros was refunded {euros} euros"


def main() -> None:
    """Explore the world with the bug and without it."""
    for refunds in ("session", "global"):
        os.environ["REFUNDS"] = refunds
        result = explore(make_world, [ask, return_goods], [no_order_is_refunded_twice], max_depth=2)
        print(f"{refunds}: {len(result.graph.states)} states, {len(result.violations)} violations")
        for found in result.nearest():
            print(f"  {found.message}: {' → '.join(map(str, found.path))}")
        if result.has_passed:
            print("  orders are refunded, each once")


if __name__ == "__main__":
    main()
