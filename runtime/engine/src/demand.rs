//! [`Demand`]: what a visit of a layer has asked for, and how much of it is there.
//!
//! Blocks that arrive may be used at the points of the plan's I/O side: when a segment of what was missing is complete.

use crate::bits::Bits;
use ls_control::{CoordinationPlan, Frequencies, Segments};
use std::time::Instant;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Demand {
    /// A bit for each block that was asked for.
    asked: Bits,
    /// A bit for each of those that no read has been started for.
    missing: Bits,
    /// A bit for each of those that have failed their check.
    failed: Bits,
    /// How many have a bit in `missing`.
    unread: usize,
    /// Blocks that were not there when they were asked for, and those of them that have arrived.
    absent: usize,
    arrived: usize,
    /// Arrivals that end segments, and the next of them.
    points: Segments,
    point: usize,
    /// Blocks that have run.
    ran: usize,
    /// When all had arrived, and what had run by then; known if somebody watches.
    loaded: Option<(Instant, usize)>,
    watched: bool,
}

impl Demand {
    /// For layers of so many blocks at most.
    pub(crate) fn new(blocks: u32) -> Demand {
        Demand {
            asked: Bits::new(blocks),
            missing: Bits::new(blocks),
            failed: Bits::new(blocks),
            unread: 0,
            absent: 0,
            arrived: 0,
            points: Segments::new(CoordinationPlan::ONE_SHOT.io, 0),
            point: 0,
            ran: 0,
            loaded: None,
            watched: false,
        }
    }

    /// From now on it is told when all had arrived.
    pub(crate) fn watch(&mut self) {
        self.watched = true;
    }

    /// A visit begins.
    pub(crate) fn begin(&mut self) {
        for bits in [&mut self.asked, &mut self.missing, &mut self.failed] {
            bits.clear();
        }
        (self.unread, self.absent, self.arrived, self.ran) = (0, 0, 0, 0);
        self.loaded = None;
    }

    /// A block is asked for.
    pub(crate) fn ask(&mut self, block: u32) {
        self.asked.set(block);
    }

    /// It is on its way.
    pub(crate) fn is_coming(&mut self) {
        self.absent += 1;
    }

    /// It has to be read.
    pub(crate) fn miss(&mut self, block: u32) {
        self.missing.set(block);
        self.absent += 1;
        self.unread += 1;
    }

    /// Blocks that were not there.
    pub(crate) fn absent(&self) -> usize {
        self.absent
    }

    /// All have been asked for: what is absent arrives in these segments.
    pub(crate) fn cut(&mut self, io: Frequencies) {
        self.points = Segments::new(io, self.absent as u64);
        self.point = 0;
        self.pass();
    }

    /// Whether a block was asked for.
    pub(crate) fn has_asked(&self, block: u32) -> bool {
        self.asked.has(block)
    }

    /// Whether a block has been asked for and no read of it been started.
    pub(crate) fn is_missing(&self, block: u32) -> bool {
        self.missing.has(block)
    }

    /// A missing block is being read.
    pub(crate) fn found(&mut self, block: u32) {
        self.missing.unset(block);
        self.unread -= 1;
    }

    /// A block has failed its check: it has to be read once more. False if it was already.
    pub(crate) fn try_again(&mut self, block: u32) -> bool {
        let first = self.failed.set(block);
        if first {
            self.missing.set(block);
            self.unread += 1;
        }
        first
    }

    /// A block that was absent has arrived.
    pub(crate) fn arrive(&mut self) {
        self.arrived += 1;
        if self.watched && self.arrived == self.absent {
            self.loaded = Some((Instant::now(), self.ran));
        }
    }

    /// Absent blocks that are being read.
    pub(crate) fn due(&self) -> usize {
        self.absent - self.arrived - self.unread
    }

    /// Whether what has arrived may be used: a point was reached since this was asked last, or nothing more comes by
    /// itself.
    pub(crate) fn opens(&mut self) -> bool {
        let reached = self.arrived >= self.point;
        if reached {
            self.pass();
        }
        reached || self.due() == 0
    }

    fn pass(&mut self) {
        while self.point <= self.arrived {
            match self.points.next() {
                Some(point) => self.point = point as usize,
                None => {
                    self.point = usize::MAX;
                    return;
                }
            }
        }
    }

    /// Blocks have run.
    pub(crate) fn ran(&mut self, count: usize) {
        self.ran += count;
    }

    /// When all had arrived, and how many blocks had run by then; none if none was absent or nobody watches.
    pub(crate) fn loaded(&self) -> Option<(Instant, usize)> {
        self.loaded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_arrives_is_opened_at_points() {
        let mut demand = Demand::new(100);
        demand.begin();
        for block in 0..50 {
            demand.ask(block);
        }
        for block in 10..50 {
            demand.miss(block);
        }
        // Ten blocks a segment.
        demand.cut([1; 4]);
        assert_eq!((demand.absent(), demand.due()), (40, 0));
        for block in 10..50 {
            demand.found(block);
        }
        assert_eq!(demand.due(), 40);
        let opened: Vec<usize> = (1..=40)
            .filter(|_| {
                demand.arrive();
                demand.opens()
            })
            .collect();
        assert_eq!(opened, [10, 20, 30, 40]);
    }

    #[test]
    fn without_room_for_more_what_is_there_is_opened() {
        let mut demand = Demand::new(100);
        demand.begin();
        for block in 0..8 {
            demand.ask(block);
            demand.miss(block);
        }
        demand.cut(CoordinationPlan::ONE_SHOT.io);
        demand.found(3);
        assert!(!demand.is_missing(3) && demand.is_missing(4) && demand.has_asked(3));
        assert!(!demand.opens(), "one is being read");
        demand.arrive();
        assert!(demand.opens(), "nothing is being read");
    }

    #[test]
    fn a_block_is_tried_twice() {
        let mut demand = Demand::new(64);
        for _ in 0..2 {
            demand.begin();
            demand.ask(5);
            demand.miss(5);
            demand.cut([1; 4]);
            demand.found(5);
            assert!(demand.try_again(5) && demand.is_missing(5) && demand.due() == 0);
            demand.found(5);
            assert!(!demand.try_again(5) && !demand.is_missing(5) && demand.due() == 1);
        }
    }

    #[test]
    fn the_last_arrival_is_remembered_with_what_had_run() {
        let mut demand = Demand::new(64);
        demand.watch();
        demand.begin();
        for block in 0..5 {
            demand.ask(block);
        }
        demand.is_coming();
        demand.miss(4);
        demand.cut([1; 4]);
        demand.found(4);
        demand.arrive();
        assert_eq!(demand.loaded(), None);
        demand.ran(3);
        demand.arrive();
        demand.ran(2);
        assert_eq!(demand.loaded().map(|(_, ran)| ran), Some(3));
        demand.begin();
        assert_eq!(demand.loaded(), None);
    }
}
