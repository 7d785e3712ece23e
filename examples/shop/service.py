"""A small shop behind HTTP: orders in SQLite, carts and caches in Redis, documents in files.

    python -m examples.shop.service FOLDER REDIS_URL [BUG ...]

There is one copy of one book. Each customer can order it once; a returned copy can be sold to the
other. The shop prints its port, and exits when its standard input is closed. Each bug of `BUGS` is
only present if it is named.
"""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import redis

PRICE = 30
DISCOUNT = 20
PREFIX = "shop:"
BUGS = {
    "lock_left": "a refused checkout leaves its lock",
    "oversell": "a checkout does not look at the stock",
    "stale_stock": "a cancellation leaves the old stock in the cache",
    "paid_after_cancel": "a cancelled order can be paid",
    "double_refund": "the cancellation of a packed order refunds twice",
    "label_left": "the cancellation of a packed order leaves its label",
    "stale_total": "a coupon leaves the old total in the cache, and that is charged",
    "full_refund": "a returned order is refunded at the full price, also with a coupon",
    "no_credit_note": "there is no credit note if the order was looked at after its return",
    "copy_twice": "a refund puts the returned copy into stock again if it was sold meanwhile",
}
SCHEMA = """
PRAGMA journal_mode = WAL;
CREATE TABLE stock (copies INTEGER NOT NULL);
CREATE TABLE orders (customer TEXT PRIMARY KEY, status TEXT NOT NULL, total INTEGER NOT NULL);
CREATE TABLE payments (customer TEXT, number INTEGER, amount INTEGER NOT NULL,
    PRIMARY KEY (customer, number));
INSERT INTO stock VALUES (1);
"""


class Refused(Exception):
    """The shop refuses a request in its current state."""


def create(folder: Path) -> None:
    """Create the database and the folders of a new shop."""
    for name in ("labels", "papers"):
        (folder / "files" / name).mkdir(parents=True)
    with sqlite3.connect(folder / "shop.db") as db:
        db.executescript(SCHEMA)
    db.close()


class Shop:
    """The operations of the shop; nothing is kept in memory between requests."""

    def __init__(self, folder: Path, redis_url: str, bugs: set[str]) -> None:
        self.db = sqlite3.connect(folder / "shop.db", isolation_level=None)
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.cache = redis.Redis.from_url(redis_url, decode_responses=True)
        self.files = folder / "files"
        self.bugs = bugs

    def add(self, customer: str) -> None:
        """Put the book into the cart."""
        self._require(self._status(customer) is None, "you have an order already")
        self.cache.set(f"{PREFIX}cart:{customer}", 1)

    def remove(self, customer: str) -> None:
        """Empty the cart."""
        self._require(bool(self.cache.delete(f"{PREFIX}cart:{customer}")), "the cart is empty")

    def checkout(self, customer: str) -> None:
        """Order what is in the cart, under a lock that keeps others out."""
        lock = f"{PREFIX}lock"
        self._require(bool(self.cache.set(lock, 1, nx=True)), "a checkout is under way")
        if "lock_left" in self.bugs and self._status(customer):
            raise Refused("you have an order already")
        try:
            self._place(customer)
        finally:
            self.cache.delete(lock)

    def _place(self, customer: str) -> None:
        self._require(self._status(customer) is None, "you have an order already")
        cart = f"{PREFIX}cart:{customer}"
        self._require(bool(self.cache.exists(cart)), "the cart is empty")
        self._require("oversell" in self.bugs or self._copies() > 0, "sold out")
        with self._transaction():
            self.db.execute("UPDATE stock SET copies = copies - 1")
            self.db.execute("INSERT INTO orders VALUES (?, 'placed', ?)", (customer, PRICE))
        self.cache.delete(cart, f"{PREFIX}stock")

    def coupon(self, customer: str) -> None:
        """Reduce the total of an unpaid order, once."""
        is_new = self._status(customer) == "placed" and self._total(customer) == PRICE
        self._require(is_new, "a coupon is for a new order")
        order = (PRICE - DISCOUNT, customer)
        self.db.execute("UPDATE orders SET total = ? WHERE customer = ?", order)
        if "stale_total" not in self.bugs:
            self.cache.delete(f"{PREFIX}total:{customer}")

    def look(self, customer: str) -> str:
        """Show an open order; its total is cached until the order changes."""
        status = self._status(customer)
        is_open = status not in (None, "cancelled", "refunded")
        self._require(is_open, "there is no open order")
        self.cache.set(f"{PREFIX}total:{customer}", self._total(customer), nx=True)
        return f"{status}: {self._seen(customer)}"

    def stock(self, customer: str) -> int:
        """Show how many copies are in stock, from the cache."""
        self.cache.set(f"{PREFIX}stock", self._copies(), nx=True)
        return int(str(self.cache.get(f"{PREFIX}stock")))

    def pay(self, customer: str) -> None:
        """Charge the total that the customer has seen."""
        status = self._status(customer)
        is_late = "paid_after_cancel" in self.bugs and status == "cancelled"
        self._require(status == "placed" or is_late, "there is nothing to pay")
        self._require(not self._charged(customer), "it is paid")
        seen = self._seen(customer)
        amount = self._total(customer) if seen is None else seen
        with self._transaction():
            self._book(customer, amount)
            if not is_late:
                self._become(customer, "paid")

    def pack(self, customer: str) -> None:
        """Pack a paid order, and print its label."""
        self._require(self._status(customer) == "paid", "only a paid order is packed")
        self._label(customer).write_text(f"to {customer}\n")
        self._become(customer, "packed")

    def ship(self, customer: str) -> None:
        """Hand over the parcel with its label, and file an invoice."""
        self._require(self._status(customer) == "packed", "only a packed order is shipped")
        self._label(customer).unlink()
        self._paper("invoice", customer).write_text(f"{self._charged(customer)} paid\n")
        self._become(customer, "shipped")

    def give_back(self, customer: str) -> None:
        """Take a shipped copy back into stock."""
        self._require(self._status(customer) == "shipped", "only a shipped order is returned")
        with self._transaction():
            self._restock()
            self._become(customer, "returned")

    def refund(self, customer: str) -> None:
        """Refund what a returned order cost, with a credit note."""
        self._require(self._status(customer) == "returned", "only a returned order is refunded")
        is_full = "full_refund" in self.bugs and self._total(customer) < PRICE
        is_seen = self._seen(customer) is not None
        if not ("no_credit_note" in self.bugs and is_seen):
            self._paper("credit", customer).write_text(f"{self._charged(customer)} refunded\n")
        with self._transaction():
            self._book(customer, -PRICE if is_full else -self._charged(customer))
            if "copy_twice" in self.bugs and self._copies() <= 0:
                self._restock()
            self._become(customer, "refunded")

    def cancel(self, customer: str) -> None:
        """Cancel an order that has not left the shop, and refund what was paid."""
        status = self._status(customer)
        self._require(status in ("placed", "paid", "packed"), "there is nothing to cancel")
        charged = self._charged(customer)
        refunds = 2 if status == "packed" and "double_refund" in self.bugs else 1
        with self._transaction():
            for _ in range(refunds if charged else 0):
                self._book(customer, -charged)
            self._restock(evicts="stale_stock" not in self.bugs)
            self._become(customer, "cancelled")
        if "label_left" not in self.bugs:
            self._label(customer).unlink(missing_ok=True)

    def _status(self, customer: str) -> str | None:
        query = "SELECT status FROM orders WHERE customer = ?"
        found = self.db.execute(query, (customer,)).fetchone()
        return str(found[0]) if found else None

    def _total(self, customer: str) -> int:
        query = "SELECT total FROM orders WHERE customer = ?"
        return int(self.db.execute(query, (customer,)).fetchone()[0])

    def _seen(self, customer: str) -> int | None:
        cached = self.cache.get(f"{PREFIX}total:{customer}")
        return None if cached is None else int(str(cached))

    def _charged(self, customer: str) -> int:
        query = "SELECT coalesce(max(amount), 0) FROM payments WHERE customer = ?"
        return int(self.db.execute(query, (customer,)).fetchone()[0])

    def _copies(self) -> int:
        return int(self.db.execute("SELECT copies FROM stock").fetchone()[0])

    def _book(self, customer: str, amount: int) -> None:
        query = "SELECT count(*) FROM payments WHERE customer = ?"
        [number] = self.db.execute(query, (customer,)).fetchone()
        self.db.execute("INSERT INTO payments VALUES (?, ?, ?)", (customer, number, amount))

    def _restock(self, *, evicts: bool = True) -> None:
        self.db.execute("UPDATE stock SET copies = copies + 1")
        if evicts:
            self.cache.delete(f"{PREFIX}stock")

    def _become(self, customer: str, status: str) -> None:
        self.db.execute("UPDATE orders SET status = ? WHERE customer = ?", (status, customer))
        self.cache.delete(f"{PREFIX}total:{customer}")

    def _label(self, customer: str) -> Path:
        return self.files / "labels" / f"{customer}.txt"

    def _paper(self, kind: str, customer: str) -> Path:
        return self.files / "papers" / f"{kind}-{customer}.txt"

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    @staticmethod
    def _require(holds: bool, reason: str) -> None:
        if not holds:
            raise Refused(reason)


class Handler(BaseHTTPRequestHandler):
    """POST /CUSTOMER/VERB; 200 with a result, 409 with a reason, 500 if the shop failed."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    verbs: dict[str, Callable[[str], Any]]

    def do_POST(self) -> None:
        """Run an operation of the shop."""
        _, customer, verb = self.path.split("/")
        try:
            status, answer = 200, self.verbs[verb](customer)
        except Refused as refused:
            status, answer = 409, str(refused)
        except Exception as error:
            status, answer = 500, f"{type(error).__name__}: {error}"
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing."""


def serve(folder: Path, redis_url: str, bugs: set[str]) -> None:
    """Serve until standard input is closed."""
    unknown = bugs - BUGS.keys()
    if unknown:
        raise SystemExit(f"unknown bugs: {', '.join(sorted(unknown))}")
    shop = Shop(folder, redis_url, bugs)
    names = "add remove checkout coupon look stock pay pack ship give_back refund cancel"
    Handler.verbs = {name: getattr(shop, name) for name in names.split()}
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        print(server.server_port, flush=True)
        threading.Thread(target=_shut_down_at_end_of_input, args=[server]).start()
        server.serve_forever()


def _shut_down_at_end_of_input(server: HTTPServer) -> None:
    sys.stdin.read()
    server.shutdown()


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], set(sys.argv[3:]))
