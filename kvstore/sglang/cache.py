"""SessionRadixCache: SGLang's radix cache, in which every node knows the sessions that own it.

A node belongs to all sessions whose sequences run through it; it is *exclusive* to a session that is its only owner.
Nodes without an owner (requests that named no session) are the engine's own, evicted by LRU alone.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode


class SessionRadixCache(RadixCache):
    def __init__(self, params: Any) -> None:
        self._owners: dict[int, set[str]] = {}
        self.epoch = 0
        """Rises whenever ownership or residency changes."""
        self.on_finished: Callable[[str, RadixKey, TreeNode], None] | None = None
        """Called with (session, key, last node) when a session's request has been inserted."""
        self.on_reset: Callable[[], None] | None = None
        """Called when the tree was emptied: every node from before is void, and so are locks on it."""
        super().__init__(params)

    # ---- SGLang's interface ------------------------------------------------------------------------------------
    def reset(self) -> None:
        super().reset()
        self._owners.clear()
        self.epoch += 1
        if self.on_reset is not None:
            self.on_reset()

    def _split_node(self, key: RadixKey, child: TreeNode, split_len: int) -> TreeNode:
        upper = super()._split_node(key, child, split_len)
        if child.id in self._owners:
            self._owners[upper.id] = set(self._owners[child.id])
        return upper

    def _delete_leaf(self, node: TreeNode) -> None:
        self._owners.pop(node.id, None)
        self.epoch += 1
        super()._delete_leaf(node)

    def cache_finished_req(self, req: Any, is_insert: bool = True, *, kv_len_to_handle: int) -> None:
        super().cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=kv_len_to_handle)
        if is_insert and not self.disable and req.session_id is not None:
            tokens = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
            key = RadixKey(tokens, req.extra_key).page_aligned(self.page_size)
            if len(key):
                _, node = self.match(key)
                self.tag(req.session_id, node)
                if self.on_finished is not None:
                    self.on_finished(req.session_id, key, node)

    def cache_unfinished_req(self, req: Any, chunked: bool = False) -> None:
        super().cache_unfinished_req(req, chunked=chunked)
        if not self.disable and req.session_id is not None:
            self.tag(req.session_id, req.last_node)

    # ---- sequences ---------------------------------------------------------------------------------------------
    def key(self, tokens: array, salt: str) -> RadixKey:
        """Whole pages of a sequence, without its last token, which never has KV. A copy: SGLang may keep keys."""
        kept = max(0, len(tokens) - 1) // self.page_size * self.page_size
        return RadixKey(array("q", tokens[:kept]), salt or None)

    def match(self, key: RadixKey) -> tuple[torch.Tensor, TreeNode]:
        """(slots of the longest prefix on the device, int64 [tokens]; its last node). May split a node."""
        result = RadixCache.match_prefix(self, MatchPrefixParams(key=key))
        return result.device_indices, result.last_device_node

    # ---- owners ------------------------------------------------------------------------------------------------
    def tag(self, session_id: str, node: TreeNode) -> None:
        """The session owns this node and all above it."""
        while node is not None and node is not self.root_node:
            owners = self._owners.setdefault(node.id, set())
            if session_id not in owners:
                owners.add(session_id)
                self.epoch += 1
            node = node.parent

    def nodes(self) -> Iterator[TreeNode]:
        """All nodes but the root, parents before their children."""
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def owners(self, node: TreeNode) -> frozenset[str]:
        return frozenset(self._owners.get(node.id, ()))

    def release(self, session_id: str) -> tuple[int, int]:
        """Give up the session's pages: (tokens freed, tokens that stayed because others own or use them).

        Shared nodes lose this owner. Never called while a turn or a store of the session itself is running: nodes that
        are in use and nobody else's keep it, so that the ledger never loses sight of them.
        """
        mine = [node for node in self.nodes() if session_id in self._owners.get(node.id, ())]
        freed = kept = 0
        held: set[int] = set()
        for node in reversed(mine):                  # children first
            owners = self._owners[node.id]
            if node.id in held or (node.lock_ref > 0 and len(owners) == 1):
                kept += len(node.key)                # another's turn has matched it and is not yet known as an owner
                held.add(node.parent.id)             # who owns a node owns all above it
            elif len(owners) > 1 or node.children:
                owners.discard(session_id)
                kept += len(node.key)
            else:
                self.token_to_kv_pool_allocator.free_segment(node.value, start_pos=0)
                freed += len(node.key)
                self._delete_leaf(node)
                self._record_remove_event(node)
        if mine:
            self.epoch += 1
        return freed, kept

    def report(self) -> dict[str, tuple[int, int, int]]:
        """session -> (tokens it owns on the device, of these exclusive, of these in use)."""
        out: dict[str, tuple[int, int, int]] = {}
        for node in self.nodes():
            owners = self._owners.get(node.id, ())
            n = len(node.key)
            for session_id in owners:
                tokens, exclusive, locked = out.get(session_id, (0, 0, 0))
                out[session_id] = (tokens + n, exclusive + (n if len(owners) == 1 else 0), locked + (n if node.lock_ref else 0))
        return out

    def shared_prefix_tokens(self, session_id: str, key: RadixKey) -> int:
        """Leading tokens of `key` on the device that other sessions own, too."""
        _, node = self.match(key)
        chain = []
        while node is not self.root_node:
            chain.append(node)
            node = node.parent
        shared = 0
        for node in reversed(chain):
            if not self._owners.get(node.id, set()) - {session_id}:
                break
            shared += len(node.key)
        return shared

    def gauges(self) -> tuple[int, int, int, int]:
        """(free, cached, in flight, total) in tokens; the first three add up to the last."""
        allocator = self.token_to_kv_pool_allocator
        free, cached, total = int(allocator.available_size()), int(self.evictable_size_), int(allocator.size)
        return free, cached, total - free - cached, total

    def sanity(self) -> list[str]:
        """All violations of this class's own invariants (tests call it when idle)."""
        alive = {node.id for node in self.nodes()}
        wrong = [f"owners of a node that is gone: {i}" for i in self._owners if i not in alive]
        for node in self.nodes():
            parent = node.parent
            if parent is not self.root_node and not self._owners.get(node.id, set()) <= self._owners.get(parent.id, set()):
                wrong.append(f"node {node.id} has owners that its parent {parent.id} has not")
        return wrong
