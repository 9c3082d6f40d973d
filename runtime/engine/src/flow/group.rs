//! Blocks that lie near each other and are read as one.

use super::{Disk, Flow, Ready};
use crate::error::EngineError;
use crate::memory::Merge;
use crate::stream::{Arrived, Stream};
use ls_bundle::extent::Extent;
use ls_cache::Loading;
use std::ops::RangeInclusive;

/// Wanted blocks of the visited layer that are being read as one.
#[derive(Debug)]
pub(super) struct Group {
    /// Blocks and the rights to fill their slots, as many as [`Merge::MAX_BLOCKS`].
    pub(super) blocks: Vec<(u32, Loading)>,
    pub(super) extent: Extent,
}

impl Group {
    /// Nothing, until blocks are put in.
    pub(super) fn empty() -> Group {
        Group { blocks: Vec::with_capacity(Merge::MAX_BLOCKS), extent: NOTHING }
    }
}

const NOTHING: Extent = Extent { offset: 0, len: 0 };

impl Flow {
    /// Which blocks around a missing one are read with it, from the first to the last: as long as one read costs less
    /// than two. None if there are none, or no buffer; else with the number of a buffer.
    pub(super) fn neighbours(&self, block: u32) -> Option<(usize, u32, u32)> {
        let merge = self.merge?;
        if self.grouped + self.ready.len() + 2 > self.max_grouped {
            return None;
        }
        let index = self.buffers.iter().position(Option::is_some)?;
        let ffn = self.ffn(self.visited);
        let (stride, blocks) = (ffn.block_stride(), ffn.blocks());
        let most = u32::try_from(merge.span_bytes / stride).unwrap_or(u32::MAX);
        let len = |blocks: u32| merge.cost(u64::from(blocks) * stride);
        let (mut first, mut last) = (block, block);
        let mut next = block + 1;
        while next < blocks && next - first < most {
            if self.demand.is_missing(next)
                && len(next - first + 1) < len(last - first + 1) + len(1)
            {
                last = next;
            }
            next += 1;
        }
        let mut next = block;
        while next > 0 && last - (next - 1) < most {
            next -= 1;
            if self.demand.is_missing(next) && len(last - next + 1) < len(last - first + 1) + len(1)
            {
                first = next;
            }
        }
        (first < last).then_some((index, first, last))
    }

    /// Starts a read of the missing ones of `blocks`, among them `block`; None if the disk takes no more.
    pub(super) fn start_group(
        &mut self,
        index: usize,
        block: u32,
        loading: Loading,
        blocks: RangeInclusive<u32>,
        stream: &mut Stream,
    ) -> Option<u64> {
        let mut group = std::mem::take(&mut self.groups[index].blocks);
        group.push((block, loading));
        for other in blocks {
            let room = group.len() < Merge::MAX_BLOCKS
                && self.grouped + self.ready.len() + group.len() < self.max_grouped;
            if !room {
                break;
            }
            if other != block && self.demand.is_missing(other) {
                let (id, _) = self.ffn(self.visited).block(other);
                let Some(loading) = self.cache.reserve(id) else { break };
                group.push((other, loading));
            }
        }
        let numbers = || group.iter().map(|(block, _)| *block);
        let first = numbers().min().expect("one block at least");
        let last = numbers().max().expect("one block at least");
        let ffn = self.ffn(self.visited);
        let ((_, first), (_, last)) = (ffn.block(first), ffn.block(last));
        let extent = Extent { offset: first.offset, len: last.end() - first.offset };
        let memory = self.buffers[index].take().expect("a free buffer");
        let number = (self.memory.len() + index) as u32;
        let started = stream.submit_block(extent, number, memory);
        let len = started.is_ok().then_some(extent.len);
        if let Err(memory) = started {
            self.buffers[index] = Some(memory);
            group.drain(..).for_each(|(_, loading)| self.cache.abandon(loading));
        }
        group.iter().for_each(|(block, _)| self.demand.found(*block));
        self.grouped += group.len();
        self.groups[index] = Group { blocks: group, extent };
        len
    }

    /// Takes the blocks of a read of several.
    pub(super) fn take_group(
        &mut self,
        arrived: Arrived,
        disk: &mut Disk<'_>,
    ) -> Result<(), EngineError> {
        let index = arrived.number as usize - self.memory.len();
        let Group { mut blocks, extent: all } = std::mem::replace(
            &mut self.groups[index],
            Group { blocks: Vec::new(), extent: NOTHING },
        );
        let mut failure = arrived.result.map_err(EngineError::io).err();
        let is_read = failure.is_none();
        let start = disk.stream.skip(all);
        self.grouped -= blocks.len();
        for (block, loading) in blocks.drain(..) {
            let (id, extent) = self.ffn[self.visited.index()].block(block);
            let from = start + (extent.offset - all.offset) as usize;
            let bytes = &arrived.memory.bytes()[from..][..extent.len as usize];
            let checked = if is_read { disk.checker.block(id, bytes) } else { Ok(()) };
            if is_read && checked.is_ok() {
                let memory = self.memory[loading.slot().0 as usize].as_mut();
                let memory = memory.expect("nothing is read into the slot itself");
                let skip = disk.stream.skip(extent);
                memory.bytes_mut()[skip..][..bytes.len()].copy_from_slice(bytes);
                let slot = self.cache.publish(loading);
                self.ready.push(Ready { block, slot });
                self.demand.arrive();
                continue;
            }
            self.cache.abandon(loading);
            if let Err(error) = checked
                && !self.may_try_again(block)
            {
                failure = failure.or(Some(error));
            }
        }
        self.groups[index].blocks = blocks;
        self.buffers[index] = Some(arrived.memory);
        failure.map_or(Ok(()), Err)
    }

    /// After a block failed its check: asks for it once more; false if it was already.
    pub(super) fn may_try_again(&mut self, block: u32) -> bool {
        let again = self.demand.try_again(block);
        if again {
            self.wanted.push(block);
        }
        again
    }
}
