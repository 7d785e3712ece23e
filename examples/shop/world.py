"""The shop as a world: its systems, its actions and its invariants.

    holdfast explore examples.shop.world:make_world

All bugs are present, except those that SHOP_MENDED names (`oversell,lock_left`, or `all`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import redis

from holdfast.worlds import FileSystem, SqliteSystem, World, action, invariant
from holdfast.worlds.systems.redis import RedisSystem

from .servers import redis_server, shop_server
from .service import BUGS, PREFIX, create

CUSTOMERS = ["ann", "bob"]
# Only ann has a coupon, and has her book shipped; bob collects his.
ANN = ["ann"]
HOLDING = ("placed", "paid", "packed", "shipped")


class ShopFailed(Exception):
    """The shop responded with an internal error."""


def present_bugs() -> list[str]:
    """Return the bugs that are present."""
    mended = os.environ.get("SHOP_MENDED", "").split(",")
    return [] if mended == ["all"] else [name for name in BUGS if name not in mended]


def make_world() -> World:
    """Start a Redis server and the shop in a new folder; closing the world removes them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shop-"))).resolve()
        create(folder)
        url = stack.enter_context(redis_server(folder))
        # The system of a file must be opened before this process connects to the file.
        db = SqliteSystem(folder / "shop.db")
        cache = RedisSystem(url, prefix=PREFIX)
        files = FileSystem(folder / "files")
        port = stack.enter_context(shop_server(folder, url, present_bugs()))
        shop = stack.enter_context(closing(HTTPConnection("127.0.0.1", port)))
        books = stack.enter_context(closing(sqlite3.connect(folder / "shop.db")))
        looks = stack.enter_context(redis.Redis.from_url(url))
        clients = {"shop": shop, "books": books, "cache": looks, "files": folder / "files"}
        world = World({"db": db, "cache": cache, "files": files}, clients=clients)
        world.on_close(stack.pop_all().close)
        return world


def ask(world: World, customer: str, verb: str) -> Any:
    """Send a request; a refusal is a response like any other."""
    shop: HTTPConnection = world.clients["shop"]
    shop.request("POST", f"/{customer}/{verb}")
    response = shop.getresponse()
    answer = json.loads(response.read())
    if response.status >= 500:
        raise ShopFailed(answer)
    return answer


@action(parameters={"customer": CUSTOMERS})
def add(world: World, customer: str) -> Any:
    return ask(world, customer, "add")


@action(parameters={"customer": CUSTOMERS})
def remove(world: World, customer: str) -> Any:
    return ask(world, customer, "remove")


@action(parameters={"customer": CUSTOMERS})
def checkout(world: World, customer: str) -> Any:
    return ask(world, customer, "checkout")


@action(parameters={"customer": ANN})
def coupon(world: World, customer: str) -> Any:
    return ask(world, customer, "coupon")


@action(parameters={"customer": ANN})
def look(world: World, customer: str) -> Any:
    return ask(world, customer, "look")


@action
def stock(world: World) -> Any:
    return ask(world, "anybody", "stock")


@action(parameters={"customer": CUSTOMERS})
def pay(world: World, customer: str) -> Any:
    return ask(world, customer, "pay")


@action(parameters={"customer": ANN})
def pack(world: World, customer: str) -> Any:
    return ask(world, customer, "pack")


@action(parameters={"customer": ANN})
def ship(world: World, customer: str) -> Any:
    return ask(world, customer, "ship")


@action(parameters={"customer": ANN})
def give_back(world: World, customer: str) -> Any:
    return ask(world, customer, "give_back")


@action(parameters={"customer": ANN})
def refund(world: World, customer: str) -> Any:
    return ask(world, customer, "refund")


@action(parameters={"customer": CUSTOMERS})
def cancel(world: World, customer: str) -> Any:
    return ask(world, customer, "cancel")


def rows(world: World, query: str) -> list[Any]:
    """Query the database of the shop."""
    books: sqlite3.Connection = world.clients["books"]
    return books.execute(query).fetchall()


def copies(world: World) -> int:
    """Return how many copies are in stock."""
    return int(rows(world, "SELECT copies FROM stock")[0][0])


@invariant(severity="low")
def no_lock_is_left(world: World) -> None:
    assert not world.clients["cache"].exists(f"{PREFIX}lock"), "nobody is in a checkout"


@invariant(severity="critical")
def stock_is_never_negative(world: World) -> None:
    assert copies(world) >= 0, f"{copies(world)} copies in stock"


@invariant(severity="medium")
def cached_stock_is_true(world: World) -> None:
    cached = world.clients["cache"].get(f"{PREFIX}stock")
    assert cached is None or int(cached) == copies(world), f"{cached} cached, {copies(world)} there"


@invariant
def cancelled_orders_hold_no_money(world: World) -> None:
    held = rows(
        world,
        "SELECT customer, sum(amount) FROM payments JOIN orders USING (customer)"
        " WHERE status = 'cancelled' GROUP BY customer HAVING sum(amount) > 0",
    )
    assert held == [], f"paid and cancelled: {held}"


@invariant(severity="critical")
def nobody_is_refunded_twice(world: World) -> None:
    query = "SELECT customer FROM payments WHERE amount < 0 GROUP BY 1 HAVING count(*) > 1"
    assert rows(world, query) == [], f"refunded twice: {rows(world, query)}"


@invariant
def labels_are_of_packed_orders(world: World) -> None:
    packed = {customer for (customer,) in rows(
        world, "SELECT customer FROM orders WHERE status = 'packed'"
    )}  # fmt: skip
    labels = {path.stem for path in (world.clients["files"] / "labels").iterdir()}
    assert labels == packed, f"labels of {labels}, and {packed} is packed"


@invariant(severity="critical")
def the_total_is_charged(world: World) -> None:
    query = (
        "SELECT customer, amount, total FROM payments JOIN orders USING (customer)"
        " WHERE amount > 0 AND amount <> total"
    )
    assert rows(world, query) == [], f"charged and due: {rows(world, query)}"


@invariant(severity="critical")
def refunds_are_what_was_charged(world: World) -> None:
    query = (
        "SELECT paid.customer, back.amount, paid.amount FROM payments AS paid, payments AS back"
        " WHERE paid.customer = back.customer AND paid.amount > 0 AND back.amount < 0"
        " AND paid.amount + back.amount <> 0"
    )
    assert rows(world, query) == [], f"refunded and charged: {rows(world, query)}"


@invariant(severity="medium")
def refunded_orders_have_a_credit_note(world: World) -> None:
    papers = world.clients["files"] / "papers"
    for (customer,) in rows(world, "SELECT customer FROM orders WHERE status = 'refunded'"):
        assert (papers / f"credit-{customer}.txt").is_file(), f"{customer} has none"


@invariant
def no_copy_appears_or_vanishes(world: World) -> None:
    held = [status for (status,) in rows(world, "SELECT status FROM orders") if status in HOLDING]
    total = copies(world) + len(held)
    assert total == 1, f"{total} copies, and the shop bought 1"
