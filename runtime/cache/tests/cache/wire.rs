//! Tables of reuse as bytes.

use crate::{gaps, hazard};
use ls_cache::ReuseTable;
use proptest::prelude::*;

fn tables() -> [ReuseTable; 2] {
    [ReuseTable::Gaps(gaps()), ReuseTable::Hazard(hazard(7))]
}

#[test]
fn tables_read_back() {
    for table in tables() {
        assert_eq!(ReuseTable::from_bytes(&table.to_bytes()).unwrap(), table);
    }
}

proptest! {
    #[test]
    fn damaged_bytes_are_an_error_or_another_table(which in 0usize..2, at in 0usize..10_000, to: u8) {
        let mut bytes = tables()[which].to_bytes();
        let at = at % bytes.len();
        bytes[at] = to;
        if let Ok(read) = ReuseTable::from_bytes(&bytes) {
            prop_assert_eq!(read.to_bytes(), bytes);
        }
    }

    #[test]
    fn half_a_table_is_none(which in 0usize..2, share in 0.0f64..1.0) {
        let bytes = tables()[which].to_bytes();
        let cut = (bytes.len() as f64 * share) as usize;
        prop_assert!(ReuseTable::from_bytes(&bytes[..cut]).is_err());
    }
}

#[test]
fn hostile_bytes_are_refused() {
    let [gaps, hazard] = tables().map(|table| table.to_bytes());
    let with = |bytes: &[u8], at: usize, number: u32| {
        let mut bytes = bytes.to_vec();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        bytes
    };
    let cases = [
        (with(&gaps, 0, 0), "magic"),
        (with(&gaps, 4, 2), "version"),
        (with(&gaps, 8, 2), "kind"),
        (with(&gaps, 12, 0), "gaps of a history"),
        (with(&gaps, 12, 9), "thresholds of gaps"),
        (with(&gaps, 12, 1), "behind the table"),
        (with(&gaps, 16, 2), "thresholds of gaps"),
        (with(&gaps, 16, 255), "bytes left"),
        (with(&gaps, 20, u32::MAX), "ascending"),
        (with(&hazard, 12, 9), "visits remembered"),
        (with(&hazard, 20, 0), "levels"),
        (with(&hazard, 24, 65), "levels"),
        (with(&hazard, 28, u32::MAX), "blocks"),
        (with(&hazard, 28, 1 << 20), "bytes left"),
        (with(&hazard, 32, 1024), "ascending"),
    ];
    for (bytes, word) in cases {
        let error = ReuseTable::from_bytes(&bytes).unwrap_err().to_string();
        assert!(error.contains(word), "no {word:?} in {error}");
    }
}
