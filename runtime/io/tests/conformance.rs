//! What every store must do: io_uring, threads with direct and with buffered reads, and the simulated disk.

use std::collections::HashMap;
use std::io::Write;
use std::sync::Arc;

use ls_io::{
    Alignment, BlockRead, BlockStore, Completion, Counters, Faults, Prefer, SimOptions, SimStore,
    StoreOptions, Wait, open, window,
};
use ls_sync::Slot;
use proptest::prelude::*;
use tempfile::NamedTempFile;

/// Not a multiple of any block size, so that the last window reaches behind the end.
const FILE_BYTES: usize = 3 * 1024 * 1024 + 777;

/// Bytes that differ wherever one could be mistaken for another.
fn content(len: usize) -> Vec<u8> {
    let word = |i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes();
    (0..len as u64).step_by(8).flat_map(word).take(len).collect()
}

/// A file that holds `bytes` and, as far as we can tell, lies on the disk and not in the page cache.
fn file_of(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

/// What it is called in messages, and the store.
type Arm = (String, Box<dyn BlockStore>);

/// Every store over `bytes`; the file lives as long as the tuple's second part.
fn stores(bytes: &[u8], depth: u32) -> (Vec<Arm>, NamedTempFile) {
    let file = file_of(bytes);
    let mut all: Vec<Arm> = Vec::new();
    for (prefer, direct) in [
        (Prefer::Uring, true),
        (Prefer::Uring, false),
        (Prefer::Pread, true),
        (Prefer::Pread, false),
    ] {
        match open(file.path(), &StoreOptions { depth, prefer, direct }) {
            Ok(opened) => all.push((format!("{prefer:?} direct={direct}"), opened.store)),
            // A sandbox may forbid io_uring; nothing may forbid the rest.
            Err(e) => assert!(prefer == Prefer::Uring, "{prefer:?} direct={direct}: {e}"),
        }
    }
    let faults = Faults { short_per_mille: 300, eio_first: 1, ..Faults::default() };
    for (name, faults) in [("simulated", Faults::default()), ("simulated, faulty", faults)] {
        let options = SimOptions { seed: 7, depth, faults, ..SimOptions::default() };
        let store = SimStore::new(Arc::new(bytes.to_vec()), options);
        all.push((name.into(), Box::new(store)));
    }
    (all, file)
}

fn reap(store: &mut dyn BlockStore, wait: Wait) -> Vec<Completion> {
    let mut completions = Vec::new();
    store.reap(wait, &mut |completion| completions.push(completion)).unwrap();
    completions
}

fn read_at(offset: u64, len: usize, tag: u32) -> BlockRead {
    BlockRead { offset, len, into: Slot::allocate(len).unwrap(), tag }
}

/// One read from start to end.
fn read_one(store: &mut dyn BlockStore, offset: u64, len: usize) -> Completion {
    store.submit(read_at(offset, len, 0)).unwrap();
    reap(store, Wait::One).pop().unwrap()
}

/// What a window must hold: the file, then zeros.
fn expected(bytes: &[u8], offset: u64, len: usize) -> Vec<u8> {
    let start = (offset as usize).min(bytes.len());
    let mut wanted = bytes[start..(start + len).min(bytes.len())].to_vec();
    wanted.resize(len, 0);
    wanted
}

#[test]
fn random_reads_bring_the_right_bytes_tags_and_counts() {
    let bytes = content(FILE_BYTES);
    let (stores, _file) = stores(&bytes, 8);
    for (name, mut store) in stores {
        let alignment = store.alignment();
        let mut seed = 1u64;
        let mut random = move |below: u64| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        let mut asked: HashMap<u32, (u64, usize)> = HashMap::new();
        let mut wanted = Counters::default();
        let mut done = 0;
        for tag in 0..300 {
            let first = random(FILE_BYTES as u64);
            let longest = if tag % 10 == 0 { 500_000 } else { 20_000 };
            let plain = random(longest).min(FILE_BYTES as u64 - first);
            let (offset, len) = window(first, plain, alignment);
            asked.insert(tag, (offset, len));
            wanted.reads += 1;
            wanted.bytes += len as u64;
            let mut read = read_at(offset, len, tag);
            read.into.bytes_mut().fill(0xa5);
            while let Err(back) = store.submit(read) {
                assert_eq!(store.in_flight(), store.depth(), "{name}: refused without being full");
                assert_eq!((back.tag, back.offset, back.len), (tag, offset, len), "{name}");
                read = back;
                done += check_all(&name, &bytes, &mut asked, reap(&mut *store, Wait::One));
            }
            done += check_all(&name, &bytes, &mut asked, reap(&mut *store, Wait::Poll));
        }
        while store.in_flight() > 0 {
            let completions = reap(&mut *store, Wait::One);
            assert!(!completions.is_empty(), "{name}: waited for nothing");
            done += check_all(&name, &bytes, &mut asked, completions);
        }
        assert!(reap(&mut *store, Wait::One).is_empty(), "{name}: nothing is in flight");
        assert_eq!(done, 300, "{name}");
        wanted.retries = store.counters().retries;
        assert_eq!(store.counters(), wanted, "{name}");
        if name.contains("faulty") {
            assert!(wanted.retries > 10, "{name}: no fault was injected");
        }
    }
}

/// Compares completions with what was asked under their tags, which are then gone.
fn check_all(
    name: &str,
    bytes: &[u8],
    asked: &mut HashMap<u32, (u64, usize)>,
    completions: Vec<Completion>,
) -> usize {
    let count = completions.len();
    for Completion { read, result } in completions {
        let (offset, len) = asked.remove(&read.tag).expect("a tag comes back once");
        result.unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!((read.offset, read.len), (offset, len), "{name}");
        let equal = read.into.bytes()[..len] == expected(bytes, offset, len);
        assert!(equal, "{name}: {len} bytes at {offset} differ");
    }
    count
}

#[test]
fn a_full_store_gives_the_read_back() {
    let (stores, _file) = stores(&content(FILE_BYTES), 3);
    for (name, mut store) in stores {
        for tag in 0..3 {
            store.submit(read_at(0, 4096, tag)).unwrap();
        }
        assert_eq!(store.in_flight(), 3, "{name}");
        let back = store.submit(read_at(8192, 4096, 99)).expect_err("full");
        assert_eq!((back.offset, back.len, back.tag, back.into.len()), (8192, 4096, 99, 4096));
        let mut tags = Vec::new();
        while store.in_flight() > 0 {
            tags.extend(reap(&mut *store, Wait::One).iter().map(|c| c.read.tag));
        }
        tags.sort_unstable();
        assert_eq!(tags, [0, 1, 2], "{name}");
        store.submit(back).unwrap();
    }
}

#[test]
fn reads_behind_the_end_fail_and_name_the_place() {
    let (stores, _file) = stores(&content(FILE_BYTES), 2);
    for (name, mut store) in stores {
        let unit = store.alignment().offset as usize;
        let last = FILE_BYTES.next_multiple_of(unit) as u64;
        for (offset, len) in [(last, 4096), (last - unit as u64, unit + 4096), (1 << 40, 4096)] {
            let error = read_one(&mut *store, offset, len).result.expect_err(&name);
            assert!(error.is_truncated(), "{name}: {error}");
            let text = error.to_string();
            assert!(text.contains(&format!("{len} bytes at offset {offset}")), "{name}: {text}");
        }
        assert_eq!((store.counters().reads, store.counters().bytes), (0, 0), "{name}");
        assert!(read_one(&mut *store, 0, 4096).result.is_ok(), "{name}: works after an error");
    }
}

#[test]
fn a_file_that_was_truncated_after_open_is_an_error() {
    let bytes = content(FILE_BYTES);
    let (stores, file) = stores(&bytes, 2);
    file.as_file().set_len(100_000).unwrap();
    for (name, mut store) in stores {
        if store.name() == "simulated" {
            continue;
        }
        let error = read_one(&mut *store, 65536, 65536).result.expect_err(&name);
        assert!(error.is_truncated(), "{name}: {error}");
        let text = error.to_string();
        assert!(text.contains("shorter than 131072 bytes"), "{name}: {text}");
        let whole = read_one(&mut *store, 0, 65536);
        assert!(whole.result.is_ok() && whole.read.into.bytes() == &bytes[..65536], "{name}");
    }
}

#[test]
fn dropping_a_store_with_reads_in_flight_is_safe() {
    let bytes = content(FILE_BYTES);
    for round in 0..20 {
        let (stores, _file) = stores(&bytes, 16);
        for (name, mut store) in stores {
            // Slots of one mapping: a write after release would hit the memory that the next one maps.
            let mut memory = Slot::allocate(16 * 65536).unwrap();
            for tag in 0..16 {
                let rest = memory.split_off(65536);
                let into = std::mem::replace(&mut memory, rest);
                let offset = u64::from(tag + round) * 65536;
                store.submit(BlockRead { offset, len: 65536, into, tag }).expect(&name);
            }
            drop(store);
            let again = Slot::allocate(16 * 65536).unwrap();
            assert!(again.bytes().iter().all(|&b| b == 0), "{name}: written after release");
        }
    }
}

#[test]
fn a_store_survives_a_panic_in_its_callback() {
    let bytes = content(FILE_BYTES);
    let (stores, _file) = stores(&bytes, 4);
    for (name, mut store) in stores {
        for tag in 0..4 {
            store.submit(read_at(u64::from(tag) * 4096, 4096, tag)).unwrap();
        }
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            store.reap(Wait::One, &mut |_| std::panic::resume_unwind(Box::new(()))).unwrap();
        }));
        assert!(unwound.is_err(), "{name}");
        assert_eq!(store.in_flight(), 3, "{name}");
        let completion = reap(&mut *store, Wait::One).pop().unwrap();
        assert!(completion.result.is_ok(), "{name}");
    }
}

#[test]
fn a_store_may_move_to_another_thread_while_reads_are_in_flight() {
    let bytes = content(FILE_BYTES);
    for _ in 0..10 {
        let (stores, _file) = stores(&bytes, 16);
        for (name, mut store) in stores {
            // The thread that submits is gone before anything is reaped.
            let mut store = std::thread::scope(|scope| {
                let submit = scope.spawn(move || {
                    for tag in 0..16 {
                        store.submit(read_at(u64::from(tag) * 65536, 65536, tag)).unwrap();
                    }
                    store
                });
                submit.join().unwrap()
            });
            let mut asked = (0..16).map(|tag| (tag, (u64::from(tag) * 65536, 65536))).collect();
            while store.in_flight() > 0 {
                check_all(&name, &bytes, &mut asked, reap(&mut *store, Wait::One));
            }
            assert!(asked.is_empty(), "{name}");
        }
    }
}

#[test]
fn misaligned_reads_and_small_slots_are_refused_loudly() {
    let (stores, _file) = stores(&content(FILE_BYTES), 1);
    for (name, mut store) in stores {
        let unit = u64::from(store.alignment().offset);
        let mut wrong = vec![BlockRead { len: 8192, ..read_at(0, 4096, 0) }];
        if unit > 1 {
            wrong.push(read_at(unit / 2, 4096, 0));
            wrong.push(read_at(0, 4096 + unit as usize / 2, 0));
        }
        for read in wrong {
            let what = format!("{name}: {} bytes at {}", read.len, read.offset);
            let refused = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                drop(store.submit(read));
            }));
            assert!(refused.is_err(), "{what}");
        }
        assert!(read_one(&mut *store, 0, 4096).result.is_ok(), "{name}: depth is not lost");
    }
}

#[test]
fn missing_files_folders_and_empty_files_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let options = StoreOptions::default();
    let missing = open(&folder.path().join("none.lsb"), &options).err().unwrap();
    assert_eq!(missing.errno(), Some(libc::ENOENT));
    assert!(missing.to_string().contains("none.lsb"), "{missing}");
    assert!(open(folder.path(), &options).is_err());
    let empty = file_of(b"");
    let mut store = open(empty.path(), &options).unwrap().store;
    let unit = store.alignment().offset as usize;
    assert!(read_one(&mut *store, 0, unit).result.unwrap_err().is_truncated());
}

proptest! {
    #[test]
    fn window_encloses_is_aligned_and_is_smallest(
        offset in 0u64..1 << 40,
        len in 0u64..1 << 24,
        shift in 0u32..16,
    ) {
        let unit = 1u64 << shift;
        let (start, bytes) = window(offset, len, Alignment { offset: 1 << shift, memory: 1 });
        let end = start + bytes as u64;
        prop_assert!(start.is_multiple_of(unit) && end.is_multiple_of(unit));
        prop_assert!(start <= offset && offset + len <= end);
        prop_assert!(offset - start < unit && end - (offset + len) < unit);
    }
}
