"""A store in etcd, for several coordinators: leases, transactions and watches of etcd.

etcd is spoken to over its JSON gateway, with the standard library. There, whole numbers
are strings, and fields that are 0 or false are left out.
"""

import logging
import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from .etcd_http import OUT_OF_RANGE, EtcdRefused, Gateway, decoded, encoded
from .etcd_url import EtcdUrl
from .store import (
    Condition,
    Delete,
    Item,
    Lease,
    Listing,
    Put,
    StoreUnavailable,
    check_changes,
)

CALL_SECONDS = 5.0
# etcd takes requests of 1.5 MiB unless it is told otherwise.
MAX_BYTES = 1_400_000
PAGE = 500
RETRY_SECONDS = 0.1
_LOG = logging.getLogger(__name__)


class EtcdStore:
    """The keys under a prefix of a cluster.

    Attributes:
      name: of its members.
      max_bytes: of one value.
    """

    def __init__(self, url: EtcdUrl):
        self.name = ",".join(f"{host}:{port}" for host, port in url.endpoints)
        self.max_bytes = MAX_BYTES
        self._prefix = f"{url.prefix}/"
        self._gateway = Gateway(url)
        self._calls = min(CALL_SECONDS, url.lease_seconds)

    def range(
        self, prefix: str, *, limit: int | None = None, reverse: bool = False
    ) -> Listing:
        while True:
            try:
                return self._range(prefix, limit, reverse)
            except EtcdRefused as error:
                # Its revision was compacted between two pages: from the start again.
                if error.code != OUT_OF_RANGE:
                    raise

    def transact(
        self, conditions: Sequence[Condition], changes: Sequence[Put | Delete]
    ) -> int | None:
        check_changes(changes, self.max_bytes)
        body = {
            "compare": [self._compare(condition) for condition in conditions],
            "success": [self._operation(change) for change in changes],
        }
        answer = self._call("/v3/kv/txn", body)
        if not answer.get("succeeded"):
            return None
        return int(answer["header"]["revision"])

    def lease(self, seconds: float) -> Lease:
        sent = time.monotonic()
        answer = self._call("/v3/lease/grant", {"TTL": str(math.ceil(seconds))})
        return _EtcdLease(self._gateway, int(answer["ID"]), int(answer["TTL"]), sent)

    def watch(self, prefix: str, revision: int, seconds: float) -> bool:
        request = {**self._keys(prefix), "start_revision": str(revision + 1)}
        body = {"create_request": request}
        for message in self._gateway.stream("/v3/watch", body, seconds):
            result = message.get("result", {})
            # Canceled: the revision was compacted, and etcd says nothing from then on.
            if result.get("events") or result.get("canceled"):
                return True
        return False

    def close(self) -> None:
        self._gateway.close()

    def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._gateway.call(path, body, self._calls)

    def _keys(self, prefix: str, after: str | None = None) -> dict[str, str]:
        """Returns the range of keys with a prefix, and behind `after`."""
        first = self._prefix + prefix
        stop = first[:-1] + chr(ord(first[-1]) + 1)
        return {
            "key": encoded(first if after is None else f"{self._prefix}{after}\0"),
            "range_end": encoded(stop),
        }

    def _range(self, prefix: str, limit: int | None, reverse: bool) -> Listing:
        items: list[Item] = []
        revision, after = 0, None
        while True:
            wanted = PAGE if limit is None else min(PAGE, limit - len(items))
            body = {**self._keys(prefix, after), "limit": str(wanted)}
            body["revision"] = str(revision)
            if reverse:  # etcd sorts all of them, and there is no second page
                body |= {"sort_order": "DESCEND", "sort_target": "KEY"}
                body["limit"] = str(limit or 0)
            answer = self._call("/v3/kv/range", body)
            revision = revision or int(answer["header"]["revision"])
            items.extend(map(self._item, answer.get("kvs", [])))
            is_enough = limit is not None and len(items) >= limit
            if reverse or is_enough or not answer.get("more"):
                return Listing(items, revision)
            after = items[-1].key

    def _item(self, found: dict[str, str]) -> Item:
        return Item(
            decoded(found["key"]).removeprefix(self._prefix),
            decoded(found.get("value", "")),
            int(found["create_revision"]),
            int(found["mod_revision"]),
        )

    def _compare(self, condition: Condition) -> dict[str, str]:
        what = "CREATE" if condition.what == "created" else "MOD"
        field = "create_revision" if condition.what == "created" else "mod_revision"
        return {
            "key": encoded(self._prefix + condition.key),
            "result": "EQUAL",
            "target": what,
            field: str(condition.revision),
        }

    def _operation(self, change: Put | Delete) -> dict[str, Any]:
        key = encoded(self._prefix + change.key)
        if isinstance(change, Delete):
            return {"request_delete_range": {"key": key}}
        put = {"key": key, "value": encoded(change.value)}
        if change.lease is not None:
            put["lease"] = str(change.lease)
        return {"request_put": put}


class _EtcdLease:
    """A lease that a thread renews every third of its time, whatever happens.

    It is in doubt two thirds of its time after the last renewal was sent, by our own
    clock: then etcd cannot have given it up yet.
    """

    def __init__(self, gateway: Gateway, id: int, seconds: float, sent: float):
        self.id = id
        self._gateway, self._seconds = gateway, seconds
        self._until = sent + seconds * 2 / 3
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def remaining(self) -> float:
        return 0.0 if self._ended.is_set() else self._until - time.monotonic()

    def revoke(self) -> None:
        self._ended.set()
        try:
            self._gateway.call("/v3/lease/revoke", {"ID": str(self.id)}, 1.0)
        except (StoreUnavailable, EtcdRefused) as error:
            _LOG.info("lease not revoked, it will run out: %s", error)

    def _renew(self) -> None:
        pause = self._seconds / 3
        while not self._ended.wait(pause):
            sent, body = time.monotonic(), {"ID": str(self.id)}
            try:
                answer = self._gateway.call(
                    "/v3/lease/keepalive", body, self._seconds / 3
                )
            except (StoreUnavailable, EtcdRefused) as error:
                _LOG.warning("lease not renewed, trying again: %s", error)
                pause = RETRY_SECONDS
                continue
            if int(answer["result"].get("TTL", 0)) <= 0:
                _LOG.warning("lease has run out")
                self._ended.set()
                return
            self._until = sent + self._seconds * 2 / 3
            pause = max(0.0, self._seconds / 3 - (time.monotonic() - sent))
