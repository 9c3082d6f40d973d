//! [`Stream`]: the pieces of a program, read ahead in a ring of buffers while the backend computes.
//!
//! Pieces come in one cyclic order, so the ring always knows what is needed next, across the end of a pass too. A
//! buffer belongs either to the store (being read) or to the stream (arrived, or free): a piece that is computed with
//! cannot be overwritten. Passes of another kind may have pieces of their own ([`Stream::switch`]). Beside the ring,
//! single rows and single blocks are read through the same store. Nothing is allocated after `new`.

use crate::error::EngineError;
use crate::stats::Stats;
use ls_bundle::extent::Extent;
use ls_io::{Alignment, BlockRead, BlockStore, Completion, Wait};
use ls_sync::{Slot, page_bytes};
use std::time::Instant;

/// Tags of row reads have this bit, those of blocks the next; the others are places in the ring.
const ROW: u32 = 1 << 31;
const BLOCK: u32 = 1 << 30;

#[derive(Debug)]
enum Place {
    Free(Slot),
    Reading,
    Arrived(Slot),
}

impl Place {
    /// The buffer of a free place; the place counts as being read.
    fn take(&mut self) -> Option<Slot> {
        match std::mem::replace(self, Place::Reading) {
            Place::Free(slot) => Some(slot),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// A read: the aligned window and where the wanted bytes start in it.
#[derive(Clone, Copy, Debug)]
struct WindowedRead {
    offset: u64,
    len: usize,
    skip: usize,
}

impl WindowedRead {
    fn around(extent: Extent, alignment: Alignment) -> WindowedRead {
        let (offset, len) = ls_io::window(extent.offset, extent.len, alignment);
        WindowedRead { offset, len, skip: (extent.offset - offset) as usize }
    }
}

/// Memory for weights: walked from end to end, so large pages save the processor from looking up small ones.
pub(crate) fn allocate(len: usize) -> Result<Slot, EngineError> {
    let slot = Slot::allocate(len).map_err(EngineError::memory)?;
    slot.prefer_huge_pages();
    Ok(slot)
}

/// So many pieces of `bytes` each.
pub(crate) fn split(mut room: Slot, bytes: u64, count: u32) -> Vec<Option<Slot>> {
    let mut piece = || {
        let rest = room.split_off(bytes as usize);
        Some(std::mem::replace(&mut room, rest))
    };
    (0..count).map(|_| piece()).collect()
}

/// A block that was read: its number for the caller, and the memory it was read into.
#[derive(Debug)]
pub(crate) struct Arrived {
    pub(crate) number: u32,
    pub(crate) memory: Slot,
    pub(crate) result: Result<(), ls_io::IoError>,
}

/// See the module's documentation.
pub struct Stream {
    store: Box<dyn BlockStore>,
    /// The pieces of each kind of pass, and which kind the ring serves now.
    lists: Vec<Vec<WindowedRead>>,
    list: usize,
    /// Blocks that have arrived and were not taken.
    blocks: Vec<Arrived>,
    blocks_in_flight: u32,
    ring: Vec<Place>,
    /// Pieces submitted and released since the start, over all passes.
    submitted: u64,
    released: u64,
    /// Pieces that will be asked for; reading ahead stops there.
    horizon: u64,
    rows: Vec<Place>,
    /// Read of each row buffer, to find the row in its window.
    row_reads: Vec<WindowedRead>,
    /// First failure of any read.
    failure: Option<ls_io::IoError>,
}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("store", &self.store.name())
            .field("pieces", &self.pieces().len())
            .finish_non_exhaustive()
    }
}

impl Stream {
    /// A stream of `lists` of pieces through `depth` buffers, the first list first; and `row_buffers` buffers for single
    /// rows of `row_bytes`.
    pub fn new(
        store: Box<dyn BlockStore>,
        lists: &[&[Extent]],
        depth: u32,
        row_bytes: u64,
        row_buffers: u32,
    ) -> Result<Stream, EngineError> {
        let alignment = store.alignment();
        let windows = |pieces: &&[Extent]| -> Vec<WindowedRead> {
            pieces.iter().map(|&piece| WindowedRead::around(piece, alignment)).collect()
        };
        let lists: Vec<_> = lists.iter().map(windows).collect();
        // Buffers start and end on pages.
        let (all, page) = (lists.iter().flatten(), page_bytes());
        let longest = all.map(|piece| piece.len.next_multiple_of(page)).max().unwrap_or(0);
        let row_len = (row_bytes as usize + 2 * alignment.offset as usize).next_multiple_of(page);
        let places = |count: u32, len: usize| -> Result<Vec<Place>, EngineError> {
            let mut room = allocate(count as usize * len)?;
            let mut place = || {
                let rest = room.split_off(len);
                Place::Free(std::mem::replace(&mut room, rest))
            };
            Ok((0..count).map(|_| place()).collect())
        };
        let depth = if longest == 0 { 0 } else { depth };
        Ok(Stream {
            ring: places(depth, longest)?,
            rows: places(row_buffers, row_len)?,
            row_reads: vec![WindowedRead { offset: 0, len: 0, skip: 0 }; row_buffers as usize],
            lists,
            list: 0,
            blocks: Vec::with_capacity(store.depth() as usize),
            blocks_in_flight: 0,
            store,
            submitted: 0,
            released: 0,
            horizon: 0,
            failure: None,
        })
    }

    /// Reads extents that stay resident, into one mapping. Returns, for each, its buffer and where the extent starts in
    /// it; `progress` hears of bytes as they arrive.
    pub fn load(
        &mut self,
        extents: &[Extent],
        progress: &mut dyn FnMut(u64),
    ) -> Result<Vec<(Slot, usize)>, EngineError> {
        let alignment = self.store.alignment();
        let reads: Vec<_> = extents.iter().map(|&e| WindowedRead::around(e, alignment)).collect();
        let page = page_bytes();
        let len = reads.iter().map(|read| read.len.next_multiple_of(page)).sum();
        let mut room = allocate(len)?;
        let mut loaded: Vec<Option<(Slot, usize)>> = reads.iter().map(|_| None).collect();
        let (mut next, mut arrived) = (0, 0);
        let mut failure = None;
        while arrived < reads.len() {
            while next < reads.len() && self.store.in_flight() < self.store.depth() {
                let WindowedRead { offset, len, .. } = reads[next];
                let rest = room.split_off(len.next_multiple_of(page));
                let into = std::mem::replace(&mut room, rest);
                let read = BlockRead { offset, len, into, tag: next as u32 };
                self.store.submit(read).expect("a store below its depth takes a read");
                next += 1;
            }
            let done = &mut |done: Completion| {
                arrived += 1;
                let index = done.read.tag as usize;
                match done.result {
                    Ok(()) => {
                        progress(extents[index].len);
                        loaded[index] = Some((done.read.into, reads[index].skip));
                    }
                    Err(error) => failure = failure.take().or(Some(error)),
                }
            };
            self.store.reap(Wait::One, done).map_err(EngineError::io)?;
            if let Some(error) = failure {
                return Err(EngineError::io(error));
            }
        }
        Ok(loaded.into_iter().map(|slot| slot.expect("every read has arrived")).collect())
    }

    /// Reads an extent that was loaded once more into its buffer.
    pub(crate) fn load_again(&mut self, extent: Extent, into: Slot) -> Result<Slot, EngineError> {
        let WindowedRead { offset, len, .. } = WindowedRead::around(extent, self.store.alignment());
        let read = BlockRead { offset, len, into, tag: 0 };
        self.store.submit(read).expect("nothing else is being read");
        let mut loaded = None;
        while loaded.is_none() {
            let done = &mut |done: Completion| loaded = Some((done.read.into, done.result));
            self.store.reap(Wait::One, done).map_err(EngineError::io)?;
        }
        let (slot, result) = loaded.expect("it has arrived");
        result.map(|()| slot).map_err(EngineError::io)
    }

    fn pieces(&self) -> &[WindowedRead] {
        &self.lists[self.list]
    }

    /// Serves passes of another kind from now on. What was read ahead for passes that did not come is given up.
    pub fn switch(&mut self, list: usize) {
        if list != self.list {
            if self.submitted != self.released {
                self.abort();
            }
            self.list = list;
            (self.submitted, self.released, self.horizon) = (0, 0, 0);
        }
    }

    /// Allows reading ahead for `passes` more passes.
    pub fn expect_passes(&mut self, passes: u64) {
        let count = self.pieces().len() as u64;
        let started = self.released.div_ceil(count.max(1));
        self.horizon = (started + passes) * count;
    }

    /// Starts reads as far as buffers are free. Called between computations; never blocks.
    pub fn pump(&mut self) -> Result<(), EngineError> {
        self.reap(Wait::Poll)?;
        self.submit();
        Ok(())
    }

    fn submit(&mut self) {
        while self.submitted < self.horizon
            && self.submitted < self.released + self.ring.len() as u64
        {
            let place = (self.submitted % self.ring.len() as u64) as usize;
            let pieces = self.pieces();
            let piece = pieces[(self.submitted % pieces.len() as u64) as usize];
            let into = self.ring[place].take().expect("a released place is free");
            let read = BlockRead { offset: piece.offset, len: piece.len, into, tag: place as u32 };
            if let Err(read) = self.store.submit(read) {
                self.ring[place] = Place::Free(read.into);
                return;
            }
            self.submitted += 1;
        }
    }

    fn reap(&mut self, wait: Wait) -> Result<(), EngineError> {
        let Stream { store, ring, rows, failure, blocks, blocks_in_flight, .. } = self;
        let done = &mut |done: Completion| {
            let (number, memory) = (done.read.tag & !BLOCK, done.read.into);
            let (places, index) = match done.read.tag & (ROW | BLOCK) {
                0 => (&mut *ring, done.read.tag),
                BLOCK => {
                    *blocks_in_flight -= 1;
                    blocks.push(Arrived { number, memory, result: done.result });
                    return;
                }
                _ => (&mut *rows, done.read.tag & !ROW),
            };
            places[index as usize] = match done.result {
                Ok(()) => Place::Arrived(memory),
                Err(error) => {
                    failure.get_or_insert(error);
                    Place::Free(memory)
                }
            };
        };
        store.reap(wait, done).map_err(EngineError::io)?;
        match self.failure.take() {
            Some(error) => Err(EngineError::io(error)),
            None => Ok(()),
        }
    }

    /// Whether piece `piece` of the current pass is known to be there.
    #[must_use]
    pub fn has(&self, piece: u32) -> bool {
        matches!(self.ring[self.place_of(piece)], Place::Arrived(_))
    }

    /// Waits until piece `piece` of the current pass is there. Time spent waiting counts as stalled.
    pub fn wait(&mut self, piece: u32, stats: &mut Stats) -> Result<(), EngineError> {
        if self.has(piece) {
            return Ok(());
        }
        self.pump()?;
        if self.has(piece) {
            return Ok(());
        }
        let since = Instant::now();
        while !self.has(piece) {
            assert!(self.store.in_flight() > 0, "a piece that is waited for is being read");
            self.reap(Wait::One)?;
            self.submit();
        }
        stats.stalled += since.elapsed();
        Ok(())
    }

    /// Reads piece `piece`, which has arrived, once more.
    pub(crate) fn read_again(&mut self, piece: u32) -> Result<(), EngineError> {
        let place = self.place_of(piece);
        let WindowedRead { offset, len, .. } = self.pieces()[piece as usize];
        let Place::Arrived(into) = std::mem::replace(&mut self.ring[place], Place::Reading) else {
            panic!("piece {piece} has not arrived");
        };
        let mut read = BlockRead { offset, len, into, tag: place as u32 };
        while let Err(full) = self.store.submit(read) {
            read = full;
            if let Err(error) = self.reap(Wait::One) {
                self.ring[place] = Place::Free(read.into);
                return Err(error);
            }
        }
        while !self.has(piece) {
            self.reap(Wait::One)?;
        }
        Ok(())
    }

    /// The bytes of piece `piece`, which has arrived, from its first weight on.
    #[must_use]
    pub fn bytes(&self, piece: u32) -> &[u8] {
        match &self.ring[self.place_of(piece)] {
            Place::Arrived(slot) => &slot.bytes()[self.pieces()[piece as usize].skip..],
            _ => panic!("piece {piece} has not arrived"),
        }
    }

    /// Gives the buffer of piece `piece` back. Pieces are released in order.
    pub fn release(&mut self, piece: u32) {
        let place = self.place_of(piece);
        match std::mem::replace(&mut self.ring[place], Place::Reading) {
            Place::Arrived(slot) => self.ring[place] = Place::Free(slot),
            other => panic!("piece {piece} is released while {other:?}"),
        }
        self.released += 1;
    }

    /// The ring place of a piece of the current pass: pieces are released in order, so the pass's first piece is at
    /// the last multiple of the piece count.
    fn place_of(&self, piece: u32) -> usize {
        let count = self.pieces().len() as u64;
        let sequence = self.released / count * count + u64::from(piece);
        (sequence % self.ring.len() as u64) as usize
    }

    /// Reads single rows (`extents`, each at most a row buffer long) and hands each to `use_row` with its index.
    pub fn rows(
        &mut self,
        count: usize,
        extent_of: &dyn Fn(usize) -> Extent,
        use_row: &mut dyn FnMut(usize, &[u8]),
    ) -> Result<(), EngineError> {
        let buffers = self.rows.len();
        let mut submitted = 0;
        for index in 0..count {
            while submitted < count && submitted < index + buffers {
                if self.submit_row(submitted % buffers, extent_of(submitted)) {
                    submitted += 1;
                } else if submitted > index {
                    break;
                } else {
                    // The store is full of streaming reads: a place is free once one of them is back.
                    self.reap(Wait::One)?;
                }
            }
            let buffer = index % buffers;
            while matches!(self.rows[buffer], Place::Reading) {
                self.reap(Wait::One)?;
            }
            match std::mem::replace(&mut self.rows[buffer], Place::Reading) {
                Place::Arrived(slot) => {
                    use_row(index, &slot.bytes()[self.row_reads[buffer].skip..]);
                    self.rows[buffer] = Place::Free(slot);
                }
                other => panic!("row {index} is used while {other:?}"),
            }
        }
        Ok(())
    }

    /// Starts a row's read into its buffer; false if the store is full.
    fn submit_row(&mut self, buffer: usize, extent: Extent) -> bool {
        let windowed = WindowedRead::around(extent, self.store.alignment());
        let into = self.rows[buffer].take().expect("the row before this one was used");
        let tag = ROW | buffer as u32;
        let read = BlockRead { offset: windowed.offset, len: windowed.len, into, tag };
        match self.store.submit(read) {
            Ok(()) => self.row_reads[buffer] = windowed,
            Err(read) => self.rows[buffer] = Place::Free(read.into),
        }
        matches!(self.rows[buffer], Place::Reading)
    }

    /// Lets the disk hear of blocks that were asked for.
    pub(crate) fn flush_blocks(&mut self) {
        self.store.flush();
    }

    /// Asks for a block to be read into `memory`; `number` comes back with it. If the store is full, the memory does.
    pub(crate) fn submit_block(
        &mut self,
        extent: Extent,
        number: u32,
        memory: Slot,
    ) -> Result<(), Slot> {
        debug_assert!(number < BLOCK, "a block's number has 30 bits");
        let WindowedRead { offset, len, .. } = WindowedRead::around(extent, self.store.alignment());
        let read = BlockRead { offset, len, into: memory, tag: BLOCK | number };
        let submitted = self.store.queue(read).map_err(|read| read.into);
        self.blocks_in_flight += u32::from(submitted.is_ok());
        submitted
    }

    /// A block that has arrived.
    pub(crate) fn take_block(&mut self) -> Option<Arrived> {
        self.blocks.pop()
    }

    /// After an error in the middle of a pass, or reads for nothing: waits for all reads, and is ready for the next pass. Blocks that were
    /// being read must have been taken.
    pub fn abort(&mut self) {
        for _ in 0..self.store.in_flight() {
            // Each call takes one read at least. The first error is the one that is told, not what goes wrong now.
            let _ = self.reap(Wait::One);
        }
        for place in self.ring.iter_mut().chain(&mut self.rows) {
            *place = match std::mem::replace(place, Place::Reading) {
                Place::Arrived(slot) => Place::Free(slot),
                other => other,
            };
        }
        self.failure = None;
        (self.submitted, self.released, self.horizon) = (0, 0, 0);
    }

    /// Blocks being read.
    pub(crate) fn blocks_in_flight(&self) -> u32 {
        self.blocks_in_flight
    }

    /// Waits until a block is there to be taken or, if none is being read, until any read has ended; false if there is
    /// none of either. Time spent waiting counts as stalled.
    pub(crate) fn wait_block(&mut self, stats: &mut Stats) -> Result<bool, EngineError> {
        if self.blocks.is_empty() {
            self.reap(Wait::Poll)?;
        }
        if !self.blocks.is_empty() {
            return Ok(true);
        }
        let since = Instant::now();
        let went_on = self.store.in_flight() > 0;
        while went_on && self.blocks.is_empty() {
            self.reap(Wait::One)?;
            if self.blocks_in_flight == 0 {
                break;
            }
        }
        stats.stalled += since.elapsed();
        Ok(went_on)
    }

    /// Where the first byte of `extent` lies in the memory that it was read into.
    pub(crate) fn skip(&self, extent: Extent) -> usize {
        WindowedRead::around(extent, self.store.alignment()).skip
    }

    /// The store, for its counters.
    #[must_use]
    pub fn store(&self) -> &dyn BlockStore {
        self.store.as_ref()
    }
}
