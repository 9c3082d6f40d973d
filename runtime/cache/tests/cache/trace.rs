//! Traces as bytes.

use crate::traces;
use ls_bundle::ids::{BlockId, LayerId};
use ls_cache::{AccessTrace, Blocks};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_trace_reads_back(trace in traces()) {
        prop_assert_eq!(AccessTrace::from_bytes(&trace.to_bytes()).unwrap(), trace);
    }

    #[test]
    fn damaged_bytes_are_an_error_or_another_trace(trace in traces(), at in 0usize..10_000, to: u8) {
        let mut bytes = trace.to_bytes();
        let at = at % bytes.len();
        bytes[at] = to;
        if let Ok(read) = AccessTrace::from_bytes(&bytes) {
            prop_assert_eq!(read.to_bytes(), bytes);
        }
    }
}

#[test]
fn a_trace_gives_what_was_recorded() {
    let blocks = Blocks::new(vec![10..80, 100..101]);
    let mut trace = AccessTrace::with_capacity(blocks, 2);
    trace.push([79, 10, 73, 74].map(BlockId));
    assert_eq!(trace.tokens(), 0);
    trace.push([]);
    trace.push([]);
    trace.push([BlockId(100)]);
    assert!(trace.is_full());
    assert_eq!(trace.set(0, LayerId(0)).collect::<Vec<_>>(), [10, 73, 74, 79].map(BlockId));
    let held = (10..80).filter(|&id| trace.contains(0, LayerId(0), BlockId(id)));
    assert_eq!(held.collect::<Vec<_>>(), [10, 73, 74, 79]);
    assert_eq!((trace.set_len(0, LayerId(0)), trace.set_len(1, LayerId(0))), (4, 0));
    assert_eq!(trace.set(1, LayerId(1)).collect::<Vec<_>>(), [BlockId(100)]);
}

#[test]
fn hostile_bytes_are_refused() {
    let mut trace = AccessTrace::with_capacity(Blocks::even(2, 3), 1);
    trace.push([BlockId(1)]);
    trace.push([BlockId(5)]);
    let good = trace.to_bytes();
    let with = |at: usize, number: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        bytes
    };
    let cases = [
        (Vec::new(), "bytes"),
        (good[..15].to_vec(), "bytes"),
        (with(0, 0), "magic"),
        (with(4, 2), "version"),
        (with(8, 0), "layers"),
        (with(8, u32::MAX), "layers"),
        (with(8, 4000), "bytes behind the head"),
        (with(12, u32::MAX), "bytes of sets"),
        (with(12, 0), "bytes of sets"),
        (with(16, 3), "ranges"),
        (with(24, 2), "ranges"),
        (with(28, u32::MAX), "bytes of sets"),
        (with(32, 8), "bits behind"),
        (good[..good.len() - 1].to_vec(), "bytes of sets"),
        ([&good[..], &[0; 8]].concat(), "bytes of sets"),
    ];
    for (bytes, word) in cases {
        let error = AccessTrace::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains(word), "no {word:?} in {error}");
    }
}
