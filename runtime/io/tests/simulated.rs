//! The simulated disk: the same seed tells the same story, and every fault does what it says.

use std::sync::Arc;

use ls_io::{BlockRead, BlockStore, Completion, Faults, SimOptions, SimStore, Wait};
use ls_sync::Slot;

const BLOCKS: u32 = 64;

fn disk(options: SimOptions) -> SimStore {
    let bytes = (0..BLOCKS * 4096).map(|i| (i / 4096) as u8).collect();
    SimStore::new(Arc::new(bytes), options)
}

fn with(faults: Faults) -> SimStore {
    disk(SimOptions { seed: 3, faults, ..SimOptions::default() })
}

/// Reads all blocks, each into a slot of its own.
fn read_blocks(store: &mut SimStore) -> Vec<Completion> {
    let mut completions = Vec::new();
    for block in 0..BLOCKS {
        let into = Slot::allocate(4096).unwrap();
        let mut read = BlockRead { offset: u64::from(block) * 4096, len: 4096, into, tag: block };
        while let Err(back) = store.submit(read) {
            read = back;
            store.reap(Wait::One, &mut |completion| completions.push(completion)).unwrap();
        }
    }
    while store.in_flight() > 0 {
        store.reap(Wait::One, &mut |completion| completions.push(completion)).unwrap();
    }
    completions
}

/// One read of the first two blocks.
fn read_two_blocks(store: &mut SimStore) -> Completion {
    let into = Slot::allocate(8192).unwrap();
    store.submit(BlockRead { offset: 0, len: 8192, into, tag: 0 }).unwrap();
    let mut completions = Vec::new();
    store.reap(Wait::One, &mut |completion| completions.push(completion)).unwrap();
    completions.pop().unwrap()
}

fn order(seed: u64) -> (Vec<u32>, u64) {
    let faults = Faults { eio_per_mille: 100, short_per_mille: 100, ..Faults::default() };
    let mut store = disk(SimOptions { seed, faults, ..SimOptions::default() });
    (read_blocks(&mut store).iter().map(|c| c.read.tag).collect(), store.now_us())
}

#[test]
fn the_seed_decides_order_and_time() {
    assert_eq!(order(1), order(1));
    assert_ne!(order(1), order(2));
    let (tags, _) = order(1);
    assert!(!tags.is_sorted(), "completions come out of order");
}

#[test]
fn bandwidth_bounds_virtual_time_from_below() {
    let options = SimOptions { bytes_per_s: Some(1 << 20), ..SimOptions::default() };
    let mut store = disk(options);
    assert_eq!(read_blocks(&mut store).len(), BLOCKS as usize);
    let floor_us = u64::from(BLOCKS) * 4096 * 1_000_000 / (1 << 20);
    let now_us = store.now_us();
    assert!((floor_us..floor_us * 11 / 10).contains(&now_us), "{now_us} against {floor_us}");
}

#[test]
fn eio_once_is_survived_and_counted_twice_is_not() {
    let mut once = with(Faults { eio_first: 1, ..Faults::default() });
    let completion = read_two_blocks(&mut once);
    assert!(completion.result.is_ok());
    assert_eq!(completion.read.into.bytes()[4096], 1);
    assert_eq!((once.counters().reads, once.counters().retries), (1, 1));

    let mut twice = with(Faults { eio_first: 2, ..Faults::default() });
    let error = read_two_blocks(&mut twice).result.unwrap_err();
    assert_eq!(error.errno(), Some(libc::EIO));
    assert!(error.to_string().contains("8192 bytes at offset 0"), "{error}");
    assert_eq!((twice.counters().reads, twice.counters().bytes), (0, 0));
}

#[test]
fn a_bad_range_fails_exactly_the_reads_that_touch_it() {
    // The last byte of block 4 and the first of block 5.
    let bad = 5 * 4096 - 1..5 * 4096 + 1;
    let mut store = with(Faults { eio_ranges: vec![bad], ..Faults::default() });
    let mut failed: Vec<u32> = read_blocks(&mut store)
        .iter()
        .filter(|completion| completion.result.is_err())
        .map(|completion| completion.read.tag)
        .collect();
    failed.sort_unstable();
    assert_eq!(failed, [4, 5]);
    assert_eq!(store.counters().reads, u64::from(BLOCKS) - 2);
}

#[test]
fn short_reads_are_continued_until_all_bytes_are_there() {
    let mut store = with(Faults { short_per_mille: 1000, ..Faults::default() });
    let into = Slot::allocate(BLOCKS as usize * 4096).unwrap();
    let len = into.len();
    store.submit(BlockRead { offset: 0, len, into, tag: 0 }).unwrap();
    store
        .reap(Wait::One, &mut |completion| {
            completion.result.unwrap();
            let bytes = completion.read.into.bytes();
            assert!(bytes.chunks(4096).zip(0u8..).all(|(c, i)| c.iter().all(|&b| b == i)));
        })
        .unwrap();
    assert!(store.counters().retries >= 3, "{:?}", store.counters());
    assert_eq!(store.counters().bytes, u64::from(BLOCKS) * 4096);
}

#[test]
fn flipped_bits_are_delivered_as_if_all_were_well() {
    let mut store = with(Faults { flipped_bytes: vec![4096 + 17], ..Faults::default() });
    for _ in 0..2 {
        let completion = read_two_blocks(&mut store);
        assert!(completion.result.is_ok());
        let bytes = completion.read.into.bytes();
        assert_eq!((bytes[4096 + 16], bytes[4096 + 17], bytes[4096 + 18]), (1, 0, 1));
    }
    let mut store = with(Faults { flip_per_mille: 1000, ..Faults::default() });
    for completion in read_blocks(&mut store) {
        let right = completion.read.tag as u8;
        let flips = completion.read.into.bytes().iter().map(|&b| (b ^ right).count_ones());
        assert_eq!(flips.sum::<u32>(), 1);
    }
}

#[test]
fn a_truncated_file_is_noticed() {
    let mut store = with(Faults { truncated_to: Some(5000), ..Faults::default() });
    let error = read_two_blocks(&mut store).result.unwrap_err();
    assert!(error.is_truncated(), "{error}");
}

#[test]
fn polling_moves_time_so_that_reads_end() {
    let mut store = with(Faults::default());
    let into = Slot::allocate(4096).unwrap();
    store.submit(BlockRead { offset: 0, len: 4096, into, tag: 0 }).unwrap();
    let mut polls = 0;
    while store.in_flight() > 0 {
        store.reap(Wait::Poll, &mut |_| ()).unwrap();
        polls += 1;
        assert!(polls < 1000, "a poll must let time pass");
    }
}
