"""Layout of host memory: a home for each state shard, and the buckets that shards form.

It grows when parameters are added, and is made anew when a hyperparameter changes the layout of the state.
"""

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.buckets import ELSEWHERE, Bucket, bucketing
from ..core.items import BytesAtHome, Home, Item
from ..core.loop import Core, Updates, WayBack
from ..core.packing import ArenaLayout, Packed, ShardSpec, choose_host_share, join_copies, plan_buckets
from ..cpu_update import HostUpdates
from ..device.arena import PAGE_BYTES, Region, aligned, normal_tensors
from ..device.host_limits import check_host_memory
from ..fsdp.dtensor import has_inner_tensors, largest_local_numel, local_shard, over_local, version_of
from ..optimizers.bucket_update import BoundRange, place_values
from ..optimizers.kept_state import Layouts
from ..policy import OffloadPolicy
from ..state.layout import in_dtypes_of
from ..state.shard import EntryOf, Housed, Reader, ShardHome, StateShard
from ..state.store import OffloadedState, OwnCounters, StateStore, UserState

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")

AnyHoused = TypeVar("AnyHoused", bound=Housed)
TakeRegion = Callable[[int, Sequence[int]], Region]
"""Takes host memory, given its bytes and the offsets that no copy crosses."""


class Arena(Generic[AnyHoused]):
    """Host memory: homes of all shards, laid end to end, and spare homes of the first shards or of all.

    Attributes:
        shards: shards whose homes lie here.
        moves: the bytes move to the device and back; otherwise the CPU updates them in their homes.
        regions: memory of all homes; of spare homes of the first shards; once taken, of spare homes of the others.
        begins: for each region, the offset in ``ArenaLayout`` of its first byte.
        breaks: offsets in bytes that no copy crosses.
    """

    def __init__(
        self, shards: Sequence[AnyHoused], layout: ArenaLayout, spare_bytes: int, take: TakeRegion, moves: bool = True
    ) -> None:
        """Give each of ``shards`` a home, and the first ones spare homes of at most ``spare_bytes`` in all."""
        self.moves = moves
        self.shards, self.breaks, self.layout = shards, frozenset(layout.breaks), layout
        self._with_spare = layout.count_within(spare_bytes)
        nbytes = layout.nbytes, layout.end_of(self._with_spare)
        self.begins = [0, 0]
        self.regions = [take(n, layout.breaks) for n in nbytes]
        self._settle(self.regions[0], 0, 0, len(shards))
        self._settle(self.regions[1], 0, 0, self._with_spare)

    def _settle(self, region: Region, begin: int, first: int, last: int) -> None:
        made: list[Tensor] = []
        for shard, offsets in zip(self.shards[first:last], self.layout.offsets[first:last], strict=True):
            leaves = zip(offsets, shard.leaf_layouts, strict=True)
            made[:] = [region.range(at - begin, one.nbytes, one.dtype, one.shape, one.stride) for at, one in leaves]
            shard.all_homes.append(shard.home_over(made))
            made.clear()  # another reference would count as a holder of the home
            if isinstance(shard, StateShard):
                shard.all_homes[-1].own(shard.all_homes[-1].leaves)

    def region_of(self, number: int, which: int) -> int:
        """Return the index in ``regions`` of the memory of ``all_homes[which]`` of shard ``number``."""
        return which if number < self._with_spare else 2 * which

    def _first_without_spare(self) -> int:
        """Return the offset of the page on which the first home without a spare home begins."""
        return self.layout.end_of(self._with_spare) // PAGE_BYTES * PAGE_BYTES  # breaks have to stay page-aligned

    @property
    def missing_bytes(self) -> int:
        """Return the bytes of host memory that :meth:`take_spare` would take."""
        has_all = len(self.regions) > 2 or self._with_spare == len(self.shards)
        return 0 if has_all else self.regions[0].nbytes - self._first_without_spare()

    @normal_tensors()
    def move_to(self, region: Region, entry_of: EntryOf, *, copies: bool) -> None:
        """Move all homes to ``region``, and give up spare ones. Without ``copies``, ``region`` has the values already.

        Call only while nothing is in flight, and no one reads the homes.
        """
        left = [shard.home for shard in self.shards]
        self.regions, self.begins, self._with_spare = [region, Region(0, device=_CPU, pin=False)], [0, 0], 0
        for shard in self.shards:
            shard.all_homes, shard.which = [], 0
        self._settle(region, 0, 0, len(self.shards))
        for shard, old in zip(self.shards, left, strict=True):
            has_values = copies and not (isinstance(shard, StateShard) and not entry_of(shard.param))
            for target, source in zip(shard.home.all_leaves(), old.all_leaves(), strict=True) if has_values else ():
                target.copy_(source)
            if isinstance(shard, StateShard):
                shard.carry_over(old, entry_of(shard.param))
            shard.moved(old, entry_of)

    def take_spare(self, take: TakeRegion) -> None:
        """Give spare homes to the shards without one. Call only while nothing is in flight.

        Raises:
            RuntimeError: the driver refuses to lock the memory; nothing has been taken.
        """
        begin = self._first_without_spare()
        if self.missing_bytes:
            region = take(self.missing_bytes, [at - begin for at in self.layout.breaks if at > begin])
            self.regions.append(region)
            self.begins.append(begin)
            self._settle(region, begin, self._with_spare, len(self.shards))


class ArenaHome(Home, Generic[AnyHoused]):
    """The home of ranges that move together between an arena and a place.

    Attributes:
        packed: the ranges; its numbers are indices of the arena's shards.
        shards: the shard of each range.
    """

    def __init__(self, packed: Packed, arena: Arena[AnyHoused], lending: "Lending") -> None:
        super().__init__()
        self.packed, self._arena, self._lending = packed, arena, lending
        self._numbers = {arena.shards[piece.shard]: piece.shard for piece in packed.ranges}
        self.shards = list(self._numbers)
        self._known: dict[tuple[tuple[int, int], ...], BytesAtHome] = {}
        self.follow()

    def changing(self) -> Sequence[AnyHoused]:
        """Return those of ``shards`` that updates may change."""
        return self.shards

    def follow(self, *, anew: bool = False) -> None:
        """Set ``bytes`` to the shards' homes as they are now; ``anew``: the arena has other memory."""
        if anew:
            self._known.clear()
        self.bytes = self.bytes_of(self.shards, ())

    def turn(self) -> BytesAtHome | None:
        step = self._lending.step
        if step is None or (step.own is None and not (step.moving or self._lending.readers)):
            return None
        if not step.turn(self.changing()):
            return None
        if step.own is None:
            step.move_parameters()
        return self.bytes_of(self.shards, step.moving)

    def wait_unread(self) -> None:
        if self._lending.readers:
            moving, stepping = self._lending.moving, self._lending.step is not None
            for one in self.changing():
                # Else it keeps its home in this step: no one reads that, or it has no gradient and is stored unchanged.
                if one in moving or one.spare is None or not stepping:
                    one.all_homes[one.which ^ (one in moving)].wait_unread()

    def bytes_of(self, shards: Iterable[AnyHoused], moving: Container[Housed]) -> BytesAtHome:
        """Return the newest bytes of some of its ``shards``, and the offset of each in a place."""
        arena = self._arena
        if not arena.moves:
            return []
        homes = [(self._numbers[one], one.which ^ (one in moving)) for one in shards]
        key = tuple([(number, arena.region_of(number, which)) for number, which in homes])
        if key not in self._known:  # shards alternate between two homes, so that there are few keys
            found: list[tuple[Tensor, int]] = []
            regions = dict(key)
            parts = (part for part in self.packed.leaf_copies if part[0] in regions)
            for at, run in itertools.groupby(parts, key=lambda part: regions[part[0]]):
                region, begin = arena.regions[at].bytes, arena.begins[at]
                copies = join_copies((copy for _, copy in run), arena.breaks)
                found += [(region[copy.home_offset - begin :][: copy.nbytes], copy.place_offset) for copy in copies]
            self._known[key] = found
        return self._known[key]


class StateHome(ArenaHome[StateShard]):
    """The home of the state of a bucket."""

    def is_held(self) -> bool:
        users, step = self._lending.entries(), self._lending.step
        copies = [] if step is None or step.own is None else [step.own.alone()]
        stores = [*([] if users is None else [users.unwaited]), *copies]
        return any(
            (users is not None and users.is_entry_held(shard.param))
            or shard.home.is_held([store.get(shard.param) for store in stores])
            for shard in self.shards
        )

    def version(self) -> object:
        return versions_of(home for shard in self.shards for home in shard.all_homes)


def home_of(bucket: Bucket) -> StateHome:
    """Return the home of the state of a bucket of a :class:`Plan`."""
    assert isinstance(bucket.state.home, StateHome)
    return bucket.state.home


class Plan:
    """Holds the state shards of one optimizer, their homes and their buckets.

    Attributes:
        shards: by parameter, in planning order, which is the same on every rank.
        buckets: in planning order; a bucket's number is its index.
        arenas: host memory of the shards' homes.
        of_parameters: host memory of parameters' homes; ``None`` if parameters stay on the device.
        streamed: parameters whose home is on the host.
        others: other host memory: old parameters, for roll-back.
        bucket_bytes: largest state of a bucket that may be cut; 0 before the first parameters are added.
        together: by parameter, the number of the ``fully_shard`` group that gathers it.
    """

    def __init__(
        self,
        layouts: Layouts,
        policy: OffloadPolicy,
        device: torch.device,
        lending: "Lending",
        together: Mapping[Tensor, int],
        host: HostUpdates | None,
    ) -> None:
        self._layouts, self._policy, self._device, self._lending = layouts, policy, device, lending
        self._pin, self._host = policy.pins(device.type), host
        self.shards: dict[Tensor, StateShard] = {}
        self.buckets: list[Bucket] = []
        self.arenas: list[Arena[StateShard]] = []
        self.of_parameters: Arena[Any] | None = None
        self.streamed: Collection[Tensor] = ()
        self.others: list[Region] = []
        self.bucket_bytes = 0
        self.together = self._joined = together
        self._no_bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def host_shards(self) -> Iterator[StateShard]:
        return (shard for shard in self.shards.values() if shard.on_host)

    def add(
        self, optimizer: Optimizer, params: Iterable[Tensor], states: StateStore, names: Mapping[Tensor, str]
    ) -> None:
        """Learn the layouts of ``params``, check and take memory for their state, and divide it into buckets.

        Raises:
            MemoryError: host memory does not suffice; nothing has been taken.
            ValueError: the optimizer cannot be offloaded with these parameters.
        """
        group_of = {param: number for number, group in enumerate(optimizer.param_groups) for param in group["params"]}
        shards, elementwise = [], self._layouts.capabilities.elementwise
        for param in params:
            group, name = optimizer.param_groups[group_of[param]], names.get(param, "a parameter")
            state = states.get(param)
            # State of a 0-dim parameter looks like a counter, so its layout is learnt.
            if state and (param.dim() > 0 or self._layouts.capabilities.moves_whole):
                layout = self._layouts.of_existing(param, state)
            else:
                layout = in_dtypes_of(self._layouts.learn(optimizer, param, group, name), state)
            shards.append(StateShard(param, name, elementwise, False, layout, group_of[param]))
        if not self.buckets:
            both = {shard.param: (local_shard(shard.param).nbytes, shard.nbytes) for shard in shards}
            self.bucket_bytes, self._joined = bucketing(self._policy, together=self.together, sizes=both)
        fraction = self._policy.host_fraction
        # Elements of the largest shard of each parameter over all ranks, which have to choose alike.
        may_share = (fraction and one.layout.values and not has_inner_tensors(one.param) for one in shards)
        sizes = [largest_local_numel(one.param) if may else 0 for one, may in zip(shards, may_share, strict=True)]
        for shard, on_host in zip(shards, choose_host_share(sizes, fraction), strict=True):
            shard.on_host = on_host
            shard.together = self._joined.get(shard.param, ELSEWHERE)
            shard.cuttable = self.may_cut(shard, optimizer.param_groups[shard.group])
        self._take_homes(shards)
        self.shards.update((shard.param, shard) for shard in shards)

    def may_cut(self, shard: StateShard, group: Mapping[str, object]) -> bool:
        """Return whether the tested table says that updates in pieces give this shard in ``group`` the same bits."""
        local = local_shard(shard.param)
        dtype = shard.param.dtype
        device_type = self._device.type
        if shard.on_host:
            group = {**group, **self._layouts.capabilities.host_options(group, {dtype})}
            device_type = "cpu"
        implementation = "fused" if group.get("fused") else "foreach" if group.get("foreach") else "for-loop"
        return (
            shard.on_locals
            and local.numel() > 0
            and local.is_contiguous()
            and not shard.layout.left_out
            and (implementation, device_type, dtype) in self._layouts.capabilities.cuttable
        )

    def _take_homes(self, shards: Sequence[StateShard]) -> None:
        cpu_shards = [shard for shard in shards if shard.on_host]
        streamed = [shard for shard in shards if not shard.on_host]
        # Large buckets: each costs the CPU's kernel about 0.4 ms of idle time, and only gradients and parameters move.
        cpu_buckets, cpu_homes = plan_buckets([_spec(shard) for shard in cpu_shards], 4 * self.bucket_bytes)
        pieces = ([(one.stop - one.start, cpu_shards[one.shard].param) for one in each.ranges] for each in cpu_buckets)
        passing = (sum(aligned(numel * param.element_size()) for numel, param in each) for each in pieces)
        passing_bytes = 2 * max(passing, default=0)  # parameters, and gradients of the same dtype
        buckets, homes = plan_buckets([_spec(shard) for shard in streamed], self.bucket_bytes)
        left_bytes = self._policy.snapshot_bytes - self.spare_bytes
        spare_bytes = homes.end_of(homes.count_within(left_bytes))
        cpu_spare_bytes = cpu_homes.end_of(cpu_homes.count_within(left_bytes - spare_bytes))
        needed_bytes = homes.nbytes + spare_bytes + cpu_homes.nbytes + cpu_spare_bytes
        if self._host is not None:
            needed_bytes += self._host.missing_bytes(passing_bytes)
        self.check_host_memory(needed_bytes)
        # Take memory first: the driver may refuse to lock pages, and then nothing has to be undone.
        if self._host is not None and cpu_buckets:
            self._host.reserve(passing_bytes)
        arena = Arena(streamed, homes, spare_bytes, self.region)
        cpu_arena = Arena(cpu_shards, cpu_homes, cpu_spare_bytes, self.region, moves=False)
        self.arenas += [cpu_arena, arena]
        for packed, its in (*((one, cpu_arena) for one in cpu_buckets), *((one, arena) for one in buckets)):
            number, home = len(self.buckets), StateHome(packed, its, self._lending)
            item = Item(f"state {number}", packed.nbytes if home.bytes else 0, home=home, exists=False)
            params = tuple(shard.param for shard in home.shards)
            groups = tuple(dict.fromkeys(self.together.get(param, ELSEWHERE) for param in params))
            after = frozenset(other for shard in home.shards for other in shard.buckets)
            self.buckets.append(Bucket(number, item, groups, (), params, not its.moves, after))
            for shard in home.shards:
                shard.buckets.append(number)

    @property
    def all_arenas(self) -> list[Arena[Any]]:
        return [*self.arenas, *([] if self.of_parameters is None else [self.of_parameters])]

    def housed(self) -> Iterator[Housed]:
        """Yield all state shards, and all parameters whose home is on the host."""
        return (shard for arena in self.all_arenas for shard in arena.shards)

    @property
    def regions(self) -> list[Region]:
        homes = [region for arena in self.all_arenas for region in arena.regions]
        return [region for region in (*homes, *self.others) if region.nbytes]

    @property
    def spare_bytes(self) -> int:
        return sum(region.nbytes for arena in self.all_arenas for region in arena.regions[1:])

    def missing_spare_bytes(self) -> int:
        return sum(arena.missing_bytes for arena in self.all_arenas if arena.moves)

    def take_spare_homes(self) -> None:
        """Give spare homes to all moving shards without one. Call only while nothing is in flight.

        Raises:
            RuntimeError: the driver refuses to lock the memory.
        """
        for arena in self.all_arenas:
            if arena.moves:
                arena.take_spare(self.region)

    def homes_under(self, leaves: Iterable[Tensor], what: str) -> dict[int, ShardHome]:
        """Return, by address, the homes in whose memory some of ``leaves`` lie.

        Raises:
            RuntimeError: a step has left one of the homes for its spare one; the message begins with ``what``.
        """
        addresses = {leaf.data_ptr() for leaf in leaves if leaf.device.type == "cpu" and leaf.numel()}
        found = {
            leaf.data_ptr(): (one, home)
            for one in self.housed()
            for home in one.all_homes
            for leaf in home.all_leaves()
            if leaf.data_ptr() in addresses
        }
        if any(home is not one.home for one, home in found.values()):
            raise RuntimeError(
                f"{what}: this state dict was made before the last step, and its tensors hold old state. Make a new "
                "one with get_optimizer_state_dict() right before saving."
            )
        return {address: home for address, (_, home) in found.items()}

    def check_host_memory(self, nbytes: int) -> None:
        """Raise a MemoryError if there are not ``nbytes`` of host memory on top of ``regions``."""
        check_host_memory(nbytes, self._policy.host_limit_bytes, sum(region.nbytes for region in self.regions))

    def take_region(self, nbytes: int, breaks: Sequence[int]) -> Region:
        """Take host memory for parameters, with offsets that no copy crosses; the caller adds it to an arena.

        Raises:
            MemoryError: host memory does not suffice.
            RuntimeError: the driver refuses to lock it.
        """
        self.check_host_memory(nbytes)
        return self.region(nbytes, breaks)

    def region(self, nbytes: int, breaks: Sequence[int] = ()) -> Region:
        """Take host memory without the check of :meth:`take_region`."""
        within = [at for at in breaks if at < nbytes]
        return Region(nbytes, device=self._device, pin=self._pin, breaks=within)

    def bind(
        self, bucket: Bucket, block: Tensor | None, weights_at: Callable[[Tensor, int, int], Tensor | None]
    ) -> list[BoundRange]:
        """Bind the ranges of a bucket whose place is ``block``, as the optimizer sees them.

        ``weights_at`` returns a parameter's range in its place, or ``None`` if the parameter stays on the device.
        """
        home, bound = home_of(bucket), []
        for shard, piece, offsets in zip(home.shards, home.packed.ranges, home.packed.leaf_offsets, strict=True):
            if shard.on_host:
                values = {}  # each update looks up the current home
            else:
                # Untested optimizers may look at storages; torch's, on local tensors, do not.
                apart = not (self._layouts.capabilities.known and shard.on_locals)
                memory = block if block is not None else self._no_bytes
                values = place_values(shard, piece.start, piece.stop, memory, offsets, apart=apart)
            start, stop, local = piece.start, piece.stop, local_shard(shard.param)
            weights, is_last = weights_at(shard.param, start, stop), stop == local.numel()
            if weights is not None:  # in its place: its home is on the host
                param = weights if shard.on_locals else over_local(shard.param, weights)
            elif not shard.on_locals or (start == 0 and is_last and local is shard.param):
                param = shard.param
            else:
                param = local.detach() if start == 0 and is_last else local.detach().view(-1)[start:stop]
            bound.append(BoundRange(shard, start, stop, param, values, is_last, local.data_ptr()))
        return bound

    def as_saved(self, optimizer: Optimizer, param: Tensor, state: UserState, *, empty: bool = False) -> UserState:
        homes = self.shards[param].homes if param in self.shards else {}
        return self._layouts.capabilities.conventions.as_saved(optimizer, param, state, homes, empty=empty)

    def handed_out(self, param: Tensor, saved: UserState) -> UserState:
        """Return ``saved`` with homes replaced by aliases, so that references of others can be counted."""
        if param not in self.shards:
            return saved
        shard = self.shards[param]
        homes = shard.homes
        return {n: shard.handed_out(n) if n in homes and value is homes[n] else value for n, value in saved.items()}

    def clear(self) -> None:
        """Drop all buckets and homes. A state tensor that others still hold keeps its region alive."""
        self.shards.clear()
        self.arenas.clear()
        self.others.clear()
        self.buckets.clear()


# A step that turns homes ----------------------------------------------------------------------------------------------


class Turning(Updates):
    """A step under way, and the shards whose spare home becomes the home once it is complete.

    A shard may be cut into several buckets. Each bucket stores into the spare home from its own update on. When the
    step is complete, all of them have been updated, and the spare home becomes the shard's home.

    Attributes:
        states: entries that updates write: those of ``optimizer.state``, or copies in a speculative step.
        own: the copies, while the step is speculative and no update may change a home; ``None``: it is certain.
        moving: shards that go to their spare home at the end; parameters go at once, unless the step is speculative.
    """

    def __init__(
        self, lending: "Lending", states: StateStore, own: OwnCounters | None = None, way_back: WayBack | None = None
    ) -> None:
        super().__init__(way_back)
        self._lending = lending
        self.states, self.own = states if own is None else own, own
        self.moving: dict[Housed, None] = {}

    def turn(self, shards: Sequence[AnyHoused]) -> list[AnyHoused]:
        """Note that an update changes ``shards``; return those whose spare home becomes the home with this step."""
        for shard in shards:
            spare, turns = shard.spare, self.own is not None or shard.home.is_read()
            if turns and spare is not None and shard not in self.moving and self._may_move(shard):
                self.moving[shard] = None
        return [shard for shard in shards if shard in self.moving]

    def _may_move(self, one: Housed) -> bool:
        # A shard without a gradient moves only if it is in one bucket: its other buckets may not be updated.
        return not isinstance(one, StateShard) or len(one.buckets) == 1 or self._lending.gradient(one.param) is not None

    def move_parameters(self) -> None:
        for one in [one for one in self.moving if not isinstance(one, StateShard)]:
            one.move(lambda _: {})
            del self.moving[one]

    def commit(self, done: Container[int] | None = None) -> None:
        """Make spare homes the homes of state: of all of ``moving``, or of shards whose buckets are all in ``done``."""
        for shard in self.moving:
            if isinstance(shard, StateShard) and (done is None or all(number in done for number in shard.buckets)):
                left = shard.home
                shard.move(self.states.get)
                if left.readers and left.is_held():
                    self._lending.left.append((shard, left, versions_of([left])))
        self.moving = {}


# Homes that others read -----------------------------------------------------------------------------------------------

_SPOILED = (
    "Optimizer state, or a parameter that lives on the host, was written in place while an asynchronous save was being "
    "written: that checkpoint holds some of the old values and some of the new ones. Do not use it; save again. Wait "
    "for the future of dcp.async_save() before you write there, or put other tensors into optimizer.state."
)


class Lending:
    """Records which homes others read during training, as a checkpoint's writer does: no update may write them (R4).

    A shard with a spare home alternates between the two. Without one, or if the spare home is read as well, the store
    waits for the reader::

        a save lends homes ──▶ updates of the next step: Home.turn() ──▶ Turning.commit(): optimizer.state follows

    Attributes:
        gradient: returns the gradient of a parameter.
        entries: weak reference to ``optimizer.state``, whose own entries do not count as held by others.
        readers: readers of any home; some may have finished.
        left: homes that others still held when a step left them, with their shards and versions.
    """

    def __init__(self, core: Core, gradient: Callable[[Tensor], Tensor | None]) -> None:
        self.gradient = gradient
        self._core = weakref.ref(core)  # weak, since homes of the core's items refer to this
        self.entries: Callable[[], OffloadedState | None] = lambda: None
        self.readers: list[Reader] = []
        self.left: list[tuple[StateShard, ShardHome, object]] = []
        self._is_spoiled = False

    def lend(self, reader: Reader, homes: Iterable[ShardHome]) -> None:
        """Protect ``homes``, which hold the newest bytes, from writes until ``reader`` has finished (R4)."""
        homes = list(homes)
        for home in homes:
            home.readers = [*(one for one in home.readers if one.is_reading()), reader]
        self.readers = [*(one for one in self.readers if one.is_reading()), reader]
        before = versions_of(homes)

        def look() -> None:
            if versions_of(homes) != before:
                self._is_spoiled = True
                logger.error(_SPOILED)

        reader.when_over(look)

    def check_unspoiled(self) -> None:
        """Raise if the user has written lent homes, since the checkpoint may contain a part of the write.

        Raises:
            RuntimeError: the user has written one; no update does. It is raised once, and training may continue.
        """
        if self._is_spoiled:
            self._is_spoiled = False
            raise RuntimeError(_SPOILED)

    def is_read_here(self) -> bool:
        """Return whether the calling thread reads homes for a save."""
        here = threading.current_thread()
        return any(getattr(one, "thread", None) is here and one.is_reading() for one in self.readers)

    def check_step(self) -> None:
        """Raise if a step that begins now would wait for a reader in the thread that trains."""
        for reader in self.readers if self.step is None else ():
            reader.check_step()

    def wait(self) -> None:
        """Block the host until all readers have finished."""
        for reader in self.readers:
            reader.wait()
        self.readers, self.left = [], []

    def lost_writes(self) -> list[str]:
        """Name state whose old home the user has written since a step left it: such a write is lost."""
        self.left = [one for one in self.left if one[1] is not one[0].home]  # else it is the home again
        written = [shard.name for shard, home, versions in self.left if versions_of([home]) != versions]
        self.left = [(shard, home, versions_of([home])) for shard, home, _ in self.left if home.is_held()]
        return written

    @property
    def step(self) -> Turning | None:
        """Return the step under way."""
        core = self._core()
        return None if core is None else cast(Turning | None, core.updates)

    @property
    def moving(self) -> Container[Housed]:
        """Return the shards whose spare home becomes the home once the step under way is complete."""
        step = self.step
        return () if step is None else step.moving


def _spec(shard: StateShard) -> ShardSpec:
    leaf_nbytes = tuple(leaf.nbytes for leaf in shard.leaf_layouts)
    return ShardSpec(shard.local_numel, leaf_nbytes, shard.cuttable, shard.together)


def versions_of(homes: Iterable[ShardHome]) -> list[tuple[int, ...]]:
    """Return versions that change with each write into ``homes``, through a DTensor, its local tensor or a leaf."""
    found = []
    for home in homes:
        found += [
            (*version_of(value), *(leaf._version for leaf in home.leaves[name])) for name, value in home.values.items()
        ]
        found.append(tuple(one._version for one in (home.weights, home.stand_in) if one is not None))
    return found
