//! Artifacts, journals and the store: what is written is read back, work goes on after any cut, and nothing broken,
//! foreign or incomplete is taken for whole.

#![forbid(unsafe_code)]

use ls_prep::artifact::{Artifact, Input, RecordId};
use ls_prep::exit::Exit;
use ls_prep::journal::Journal;
use ls_prep::key::Key;
use ls_prep::progress::Progress;
use ls_prep::stage::{Outcome, Stage, State, Store, merge};
use std::cell::Cell;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Six units of two records each; counts the records that it really makes.
struct Toy {
    param: u32,
    made: Cell<u32>,
}

impl Stage for Toy {
    const NAME: &'static str = "99-toy";
    const SCHEMA: u32 = 1;
    type Params = u32;

    fn params(&self) -> u32 {
        self.param
    }

    fn inputs(&self) -> Vec<Input> {
        vec![Input { name: "nothing".to_owned(), key: Key::of(b"nothing") }]
    }

    fn units(&self) -> u32 {
        6
    }

    fn records(&self, units: Range<u32>) -> u64 {
        2 * units.len() as u64
    }

    fn run(&self, journal: &mut Journal, _: &mut dyn Progress) -> ls_prep::error::Result<()> {
        for unit in journal.description().units_held() {
            for part in 0..2 {
                if !journal.contains(RecordId::new(unit, part)) {
                    let content = vec![(unit * 2 + part + self.param) as u8; 5 * part as usize];
                    journal.append(RecordId::new(unit, part), &content)?;
                    self.made.set(self.made.get() + 1);
                }
            }
        }
        Ok(())
    }
}

fn toy(param: u32) -> Toy {
    Toy { param, made: Cell::new(0) }
}

fn store() -> (TempDir, Store) {
    let dir = TempDir::new().unwrap();
    let store = Store::of_model(dir.path(), "some/model");
    (dir, store)
}

/// The bytes of the toy's artifact, and where it lies.
fn whole(param: u32) -> (TempDir, PathBuf, Vec<u8>) {
    let (dir, store) = store();
    let (artifact, outcome) = store.run(&toy(param), None, &mut ()).unwrap();
    assert_eq!(outcome, Outcome::Made);
    let (path, bytes) = (artifact.path().to_owned(), std::fs::read(artifact.path()).unwrap());
    (dir, path, bytes)
}

#[test]
fn an_artifact_reads_back_and_says_what_it_is() {
    let (_dir, path, _) = whole(3);
    let artifact = Artifact::open(&path).unwrap();
    artifact.verify().unwrap();
    assert_eq!(artifact.read(RecordId::new(4, 1)).unwrap(), [12; 5]);
    assert!(artifact.read(RecordId::new(0, 0)).unwrap().is_empty());
    assert_eq!(artifact.ids().len(), 12);
    assert_eq!(artifact.key(), toy(3).key());
    assert_eq!(*artifact.description(), toy(3).describe(0..6));
    assert_eq!(artifact.read(RecordId::new(6, 0)).unwrap_err().exit(), Exit::Incomplete);
    assert!(path.ends_with(format!("some-model/99-toy/{}.bin", toy(3).key())));
}

#[test]
fn what_is_there_is_not_made_again() {
    let (_dir, store) = store();
    let toy = toy(1);
    store.run(&toy, None, &mut ()).unwrap();
    assert_eq!(toy.made.get(), 12);
    assert_eq!(store.run(&toy, None, &mut ()).unwrap().1, Outcome::Kept);
    assert_eq!(toy.made.get(), 12);
    assert!(store.find(&toy).unwrap().is_some());
}

#[test]
fn work_cut_at_any_byte_goes_on_to_the_same_bytes() {
    let (_dir, _, bytes) = whole(7);
    let mut kept = 0;
    for cut in (0..=bytes.len()).rev().step_by(47) {
        let (_dir, store) = store();
        let toy = toy(7);
        let target = store.path(Toy::NAME, toy.key(), 6, &(0..6));
        let part = target.with_extension("part");
        // A journal that has come this far: its header still says partial.
        drop(Journal::open(&target, toy.describe(0..6)).unwrap());
        let blank = std::fs::read(&part).unwrap();
        let mut torn = bytes[..cut].to_vec();
        let header = blank.len().min(cut);
        torn[..header].copy_from_slice(&blank[..header]);
        std::fs::write(&part, torn).unwrap();
        let (artifact, _) = store.run(&toy, None, &mut ()).unwrap();
        assert!(std::fs::read(artifact.path()).unwrap() == bytes, "cut at {cut}");
        assert!(!part.exists());
        kept = kept.max(12 - toy.made.get());
    }
    assert_eq!(kept, 12, "the last cut leaves nothing to do");
}

#[test]
fn a_complete_file_without_its_name_gets_it() {
    let (_dir, path, bytes) = whole(2);
    std::fs::rename(&path, path.with_extension("part")).unwrap();
    let store = Store::of_model(path.ancestors().nth(3).unwrap(), "some/model");
    let toy = toy(2);
    assert_eq!(store.run(&toy, None, &mut ()).unwrap().1, Outcome::Resumed);
    assert_eq!((toy.made.get(), std::fs::read(&path).unwrap() == bytes), (0, true));
}

#[test]
fn a_flipped_byte_of_a_partial_file_costs_only_what_follows() {
    let (_dir, path, bytes) = whole(2);
    for at in (0..bytes.len()).step_by(43) {
        let part = path.with_extension("part");
        let mut flipped = bytes.clone();
        flipped[at] ^= 1;
        std::fs::write(&part, flipped).unwrap();
        std::fs::remove_file(&path).unwrap();
        let store = Store::of_model(path.ancestors().nth(3).unwrap(), "some/model");
        store.run(&toy(2), None, &mut ()).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes, "byte {at}");
    }
}

#[test]
fn broken_artifacts_are_refused_wherever_they_are_broken() {
    let (dir, _, bytes) = whole(5);
    let path = dir.path().join("broken");
    for cut in 0..bytes.len() {
        std::fs::write(&path, &bytes[..cut]).unwrap();
        let error = Artifact::open(&path).unwrap_err();
        assert_eq!(error.exit(), Exit::Incomplete, "cut at {cut}: {error}");
    }
    for at in 0..bytes.len() {
        let mut flipped = bytes.clone();
        flipped[at] ^= 0x40;
        std::fs::write(&path, flipped).unwrap();
        let checked = Artifact::open(&path).and_then(|artifact| artifact.verify());
        let error = checked.expect_err(&format!("byte {at} was flipped"));
        assert!(matches!(error.exit(), Exit::Corrupt | Exit::Incomplete), "{error}");
        assert!(error.to_string().contains("broken"), "{error}");
    }
    std::fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    assert_eq!(Artifact::open(&path).unwrap_err().exit(), Exit::Corrupt);
}

#[test]
fn shares_of_units_join_to_the_bytes_of_one_run() {
    let (_dir, _, bytes) = whole(9);
    let (_dir, store) = store();
    let part = |units| store.run(&toy(9), Some(units), &mut ()).unwrap().0.path().to_owned();
    let paths = [part(4..6), part(0..1), part(1..4)];
    assert!(store.find(&toy(9)).unwrap().is_none());
    let merged = merge(&paths).unwrap();
    assert!(std::fs::read(merged.path()).unwrap() == bytes);
    assert_eq!(store.run(&toy(9), None, &mut ()).unwrap().1, Outcome::Kept);
}

#[test]
fn shares_that_do_not_fit_are_named() {
    let (_dir, store) = store();
    let part = |param, units| -> PathBuf {
        store.run(&toy(param), Some(units), &mut ()).unwrap().0.path().to_owned()
    };
    let refused = |paths: &[PathBuf], words: &str| {
        let error = merge(paths).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refused(&[part(1, 0..2), part(1, 3..6)], "units 2..3 are missing");
    refused(&[part(1, 0..2), part(1, 1..6)], "units 1..2 are there twice");
    refused(&[part(1, 0..2)], "units 2..6 are missing");
    refused(&[part(1, 0..2), part(2, 2..6)], "does not belong");
    refused(&[], "no files");
    assert_eq!(store.run(&toy(1), Some(3..7), &mut ()).unwrap_err().exit(), Exit::Usage);
    assert_eq!(store.run(&toy(1), Some(3..3), &mut ()).unwrap_err().exit(), Exit::Usage);
}

#[test]
fn the_state_of_a_stage_is_told() {
    let (_dir, store) = store();
    assert_eq!(store.state(&toy(1)).unwrap(), State::Missing);
    store.run(&toy(1), Some(0..3), &mut ()).unwrap();
    let State::Partial { percent, .. } = store.state(&toy(1)).unwrap() else {
        panic!("not partial")
    };
    assert_eq!(percent, 50.0);
    store.run(&toy(1), None, &mut ()).unwrap();
    assert!(matches!(store.state(&toy(1)).unwrap(), State::Done { .. }));
    assert_eq!(store.state(&toy(2)).unwrap(), State::Stale { others: 2 });
    let path = store.path(Toy::NAME, toy(2).key(), 6, &(0..6));
    std::fs::write(path, "nonsense").unwrap();
    assert!(matches!(store.state(&toy(2)).unwrap(), State::Broken { .. }));
    assert_eq!(store.run(&toy(2), None, &mut ()).unwrap_err().exit(), Exit::Incomplete);
}

#[test]
fn one_process_writes_at_a_time() {
    let (_dir, store) = store();
    let target = store.path(Toy::NAME, toy(1).key(), 6, &(0..6));
    let held = Journal::open(&target, toy(1).describe(0..6)).unwrap();
    let error = store.run(&toy(1), None, &mut ()).unwrap_err();
    assert!(error.to_string().contains("another process"), "{error}");
    drop(held);
    store.run(&toy(1), None, &mut ()).unwrap();
}

#[test]
fn a_file_under_another_artifacts_name_is_refused() {
    let (_dir, path, _) = whole(1);
    let store = Store::of_model(path.ancestors().nth(3).unwrap(), "some/model");
    let wrong: &Path = &store.path(Toy::NAME, toy(2).key(), 6, &(0..6));
    std::fs::copy(&path, wrong).unwrap();
    let error = store.find(&toy(2)).unwrap_err();
    assert!(error.to_string().contains("another artifact"), "{error}");
}
