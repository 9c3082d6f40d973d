//! [`Stage`]: a pure function of parameters and inputs to one artifact; and [`Store`], the folder where they lie.
//!
//! `artifacts/<model>/<NN-stage>/<key>.bin`. An artifact that is there is not made again; one that was begun goes on.
//! A stage whose units (layers) are independent can be run for some of them, into `<key>.A-B.bin`; [`merge`]
//! joins such files to the same bytes that one run would have written.

use crate::artifact::{Artifact, Description, Glance, Input, RecordId};
use crate::device;
use crate::error::{PrepError, Result};
use crate::journal::{Journal, clear_scratch};
use crate::key::Key;
use crate::progress::{Phase, Progress};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A step of the preparation.
pub trait Stage {
    /// Number and name, such as `20-activations`.
    const NAME: &'static str;
    /// Raised when the same parameters and inputs give other bytes than before.
    const SCHEMA: u32;
    /// Whether the result's last bits depend on the device that tensors live on ([`crate::device`]).
    const IN_TENSORS: bool = false;
    /// All that the result depends on besides the inputs.
    type Params: Serialize;

    /// The parameters.
    fn params(&self) -> Self::Params;
    /// The inputs.
    fn inputs(&self) -> Vec<Input>;
    /// Units of the whole, that can be made apart.
    fn units(&self) -> u32 {
        1
    }
    /// Records of some units.
    fn records(&self, units: Range<u32>) -> u64;
    /// Writes those records that the journal does not have yet, of the units in its description.
    fn run(&self, journal: &mut Journal, progress: &mut dyn Progress) -> Result<()>;

    /// The name of the result.
    fn key(&self) -> Key {
        let keys: Vec<Key> = inputs(self, device::mark()).iter().map(|input| input.key).collect();
        Key::derive(Self::NAME, Self::SCHEMA, &value(&self.params()), &keys)
    }

    /// What the header of the result says, for some of its units.
    fn describe(&self, units: Range<u32>) -> Description {
        Description {
            stage: Self::NAME.to_owned(),
            schema: Self::SCHEMA,
            key: self.key(),
            params: value(&self.params()),
            inputs: inputs(self, device::mark()),
            units: self.units(),
            range: (units.start, units.end),
            records: self.records(units),
        }
    }
}

/// Memory that what is made side by side may take together.
const SIDE_BY_SIDE_BYTES: u64 = 2 << 30;

/// How many things that take `bytes` of memory each are made side by side: as many as there are processors and memory
/// for.
#[must_use]
pub fn at_once(bytes: u64) -> usize {
    let room = (SIDE_BY_SIDE_BYTES / bytes.max(1)).max(1);
    rayon::current_num_threads().min(usize::try_from(room).unwrap_or(usize::MAX))
}

/// Makes something of each of `items`, [`at_once`] of them at a time, since much of such work keeps one processor busy;
/// `keep` gets what was made in the items' order.
pub fn side_by_side<T: Copy + Sync, R: Send>(
    items: &[T],
    bytes: u64,
    make: impl Fn(T) -> Result<R> + Sync,
    mut keep: impl FnMut(T, R) -> Result<()>,
) -> Result<()> {
    for items in items.chunks(at_once(bytes)) {
        let made = items.par_iter().map(|&item| make(item)).collect::<Result<Vec<R>>>()?;
        items.iter().zip(made).try_for_each(|(&item, made)| keep(item, made))?;
    }
    Ok(())
}

/// What most stages do: each layer of the journal is a unit of `parts` records, which `make` computes together, in
/// about `layer_bytes` of memory, several layers [`side_by_side`]. Layers that are there are passed over.
pub fn each_layer(
    journal: &mut Journal,
    progress: &mut dyn Progress,
    phase: Phase,
    parts: u32,
    layer_bytes: u64,
    make: impl Fn(u32) -> Result<Vec<Vec<u8>>> + Sync,
) -> Result<()> {
    let layers = journal.description().units_held();
    progress.begin(phase, layers.len() as u64);
    let (done, missing): (Vec<u32>, Vec<u32>) = layers
        .partition(|&layer| (0..parts).all(|part| journal.contains(RecordId::new(layer, part))));
    progress.advance(done.len() as u64);
    side_by_side(&missing, layer_bytes, make, |layer, contents| {
        assert_eq!(contents.len(), parts as usize, "records of a layer");
        for (part, content) in (0..parts).zip(contents) {
            let id = RecordId::new(layer, part);
            if !journal.contains(id) {
                journal.append(id, &content)?;
            }
        }
        progress.advance(1);
        Ok(())
    })
}

fn value(params: &impl Serialize) -> Value {
    serde_json::to_value(params).expect("parameters are plain data")
}

/// The inputs, and the device's `mark` among them where the result depends on it.
fn inputs<S: Stage + ?Sized>(stage: &S, mark: Option<&str>) -> Vec<Input> {
    let mark = mark.filter(|_| S::IN_TENSORS);
    let device =
        mark.map(|name| Input { name: "device".to_owned(), key: Key::of(name.as_bytes()) });
    stage.inputs().into_iter().chain(device).collect()
}

/// Whether work was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It was there already.
    Kept,
    /// It was made from its beginning.
    Made,
    /// It was begun before and has been ended now.
    Resumed,
}

impl Outcome {
    /// For people.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Outcome::Kept => "was there",
            Outcome::Made => "made",
            Outcome::Resumed => "completed",
        }
    }
}

/// How far a stage has come.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum State {
    /// The artifact is there.
    Done {
        /// Bytes of the file.
        bytes: u64,
    },
    /// It has been begun, as a whole or by layers.
    Partial {
        /// Share of its records that are there.
        percent: f64,
        /// Bytes of its files.
        bytes: u64,
    },
    /// Only artifacts of other parameters or inputs are there.
    Stale {
        /// How many of them.
        others: usize,
    },
    /// Nothing is there.
    Missing,
    /// A file is there whose frame is broken.
    Broken {
        /// What is wrong with it.
        problem: String,
    },
}

/// The artifacts of one model.
#[derive(Clone, Debug)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The store of the model `name` inside `artifacts`.
    #[must_use]
    pub fn of_model(artifacts: &Path, name: &str) -> Store {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
        let name: String = name.chars().map(safe).collect();
        let name = name.trim_start_matches('.');
        Store { folder: artifacts.join(if name.is_empty() { "model" } else { name }) }
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where an artifact lies: `range` for some units of `units`.
    #[must_use]
    pub fn path(&self, stage: &str, key: Key, units: u32, range: &Range<u32>) -> PathBuf {
        let folder = self.folder.join(stage);
        if *range == (0..units) {
            folder.join(format!("{key}.bin"))
        } else {
            folder.join(format!("{key}.{}-{}.bin", range.start, range.end))
        }
    }

    /// The complete artifact of a stage, if it is there.
    pub fn find<S: Stage>(&self, stage: &S) -> Result<Option<Artifact>> {
        let path = self.path(S::NAME, stage.key(), stage.units(), &(0..stage.units()));
        if path.exists() {
            open(&path, &stage.describe(0..stage.units())).map(Some)
        } else {
            Ok(None)
        }
    }

    /// The artifact of a stage, which the stage named `by` needs.
    pub fn need<S: Stage>(&self, stage: &S, by: &str) -> Result<Artifact> {
        self.find(stage)?.ok_or_else(|| {
            let folder = self.folder.display();
            PrepError::incomplete(folder, format!("{by} needs {}, which is not there", S::NAME))
        })
    }

    /// Makes what is missing of `units` (all if `None`) of a stage.
    pub fn run<S: Stage>(
        &self,
        stage: &S,
        units: Option<Range<u32>>,
        progress: &mut dyn Progress,
    ) -> Result<(Artifact, Outcome)> {
        let all = stage.units();
        let units = units.unwrap_or(0..all);
        if units.is_empty() || units.end > all {
            let Range { start, end } = units;
            let problem = format!("{}: {start}..{end} are not within 0..{all}", S::NAME);
            return Err(PrepError::usage(problem));
        }
        let description = stage.describe(units.clone());
        let target = self.path(S::NAME, description.key, all, &units);
        let kept = || {
            clear_scratch(&target)?;
            Ok((open(&target, &description)?, Outcome::Kept))
        };
        if target.exists() {
            return kept();
        }
        let mut journal = Journal::open(&target, description.clone())?;
        // Another process may have finished between the look and the lock.
        if target.exists() {
            return kept();
        }
        let outcome = if journal.is_empty() { Outcome::Made } else { Outcome::Resumed };
        stage.run(&mut journal, progress)?;
        Ok((journal.finish()?, outcome))
    }

    /// How far a stage has come whose key is not known.
    pub fn state_without_key(&self, stage: &str) -> Result<State> {
        let folder = self.folder.join(stage);
        let names = match std::fs::read_dir(&folder) {
            Ok(names) => names,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(State::Missing);
            }
            Err(error) => return Err(PrepError::io(&folder, error)),
        };
        let is_artifact =
            |path: &Path| path.extension().is_some_and(|extension| extension == "bin");
        let others = names.flatten().filter(|entry| is_artifact(&entry.path())).count();
        Ok(if others > 0 { State::Stale { others } } else { State::Missing })
    }

    /// How far a stage has come.
    pub fn state<S: Stage>(&self, stage: &S) -> Result<State> {
        let (key, whole) = (stage.key().to_string(), stage.describe(0..stage.units()));
        let folder = self.folder.join(S::NAME);
        let (mut records, mut bytes, mut others, mut problem) = (0, 0, 0, None);
        let names = match std::fs::read_dir(&folder) {
            Ok(names) => names,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(State::Missing);
            }
            Err(error) => return Err(PrepError::io(&folder, error)),
        };
        for entry in names {
            let path = entry.map_err(|source| PrepError::io(&folder, source))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !(name.ends_with(".bin") || name.ends_with(".part")) {
                continue;
            }
            if !name.starts_with(&key) {
                others += usize::from(name.ends_with(".bin"));
                continue;
            }
            match Glance::at(&path) {
                Ok(glance) if name.ends_with(".bin") && glance.description == whole => {
                    return Ok(State::Done { bytes: glance.bytes });
                }
                Ok(glance) => {
                    records += glance.records;
                    bytes += glance.bytes;
                }
                Err(error) => problem = Some(error.to_string()),
            }
        }
        Ok(match problem {
            Some(problem) => State::Broken { problem },
            None if bytes > 0 => {
                let percent = 100.0 * records as f64 / whole.records.max(1) as f64;
                State::Partial { percent: percent.min(100.0), bytes }
            }
            None if others > 0 => State::Stale { others },
            None => State::Missing,
        })
    }
}

/// Opens a file that must be what `wanted` says.
fn open(path: &Path, wanted: &Description) -> Result<Artifact> {
    let artifact = Artifact::open(path)?;
    if artifact.description() != wanted {
        return Err(artifact.fault("holds another artifact than its name says; remove it"));
    }
    Ok(artifact)
}

/// Joins the files that hold the units of one artifact into the whole, beside the first of them.
///
/// They must belong together and hold every unit once. The result has the same bytes as one run's.
pub fn merge(paths: &[PathBuf]) -> Result<Artifact> {
    let mut parts = paths.iter().map(|path| Artifact::open(path)).collect::<Result<Vec<_>>>()?;
    parts.sort_by_key(|part| part.description().range);
    let Some(first) = parts.first() else {
        return Err(PrepError::usage("no files to merge"));
    };
    let mut whole = Description { range: (0, 0), records: 0, ..first.description().clone() };
    for part in &parts {
        let found = part.description();
        let same = Description { range: whole.range, records: whole.records, ..found.clone() };
        if same != whole {
            let wanted = format!("{} {}", whole.stage, whole.key);
            return Err(part.fault(format!("does not belong to {wanted}")));
        }
        if found.range.0 != whole.range.1 {
            let (next, start) = (whole.range.1, found.range.0);
            let what = if start < next { "are there twice" } else { "are missing" };
            let (low, high) = (next.min(start), next.max(start));
            return Err(PrepError::incomplete(
                part.path().display(),
                format!("units {low}..{high} {what}"),
            ));
        }
        whole.range.1 = found.range.1;
        whole.records += found.records;
    }
    if whole.range.1 != whole.units {
        let problem = format!("units {}..{} are missing", whole.range.1, whole.units);
        return Err(PrepError::incomplete(parts[0].path().display(), problem));
    }
    let target = parts[0].path().with_file_name(format!("{}.bin", whole.key));
    if target.exists() {
        return open(&target, &whole);
    }
    let mut journal = Journal::open(&target, whole)?;
    for part in &parts {
        let ids: Vec<RecordId> = part.ids().filter(|id| !journal.contains(*id)).collect();
        for id in ids {
            journal.append(id, &part.read(id)?)?;
        }
    }
    journal.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;
    use std::time::Duration;

    struct Made<const IN_TENSORS: bool>;

    impl<const IN_TENSORS: bool> Stage for Made<IN_TENSORS> {
        const NAME: &'static str = "00-some";
        const SCHEMA: u32 = 1;
        const IN_TENSORS: bool = IN_TENSORS;
        type Params = ();

        fn params(&self) {}
        fn inputs(&self) -> Vec<Input> {
            vec![Input { name: "a".to_owned(), key: Key::of(b"a") }]
        }
        fn records(&self, units: Range<u32>) -> u64 {
            units.len() as u64
        }
        fn run(&self, _: &mut Journal, _: &mut dyn Progress) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_card_is_an_input_of_what_it_computes() {
        let names = |inputs: Vec<Input>| inputs.into_iter().map(|i| i.name).collect::<Vec<_>>();
        assert_eq!(names(inputs(&Made::<true>, Some("cuda"))), ["a", "device"]);
        assert_eq!(names(inputs(&Made::<false>, Some("cuda"))), ["a"]);
        assert_eq!(names(inputs(&Made::<true>, None)), ["a"]);
    }

    #[test]
    fn what_is_made_side_by_side_is_kept_in_order_and_within_its_memory() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(4).build().unwrap();
        pool.install(|| {
            for (bytes, most) in [(0, 4), (SIDE_BY_SIDE_BYTES / 3, 3), (u64::MAX, 1)] {
                assert_eq!(at_once(bytes), most);
                let (now, seen) = (AtomicUsize::new(0), AtomicUsize::new(0));
                let make = |item: u32| {
                    seen.fetch_max(now.fetch_add(1, Relaxed) + 1, Relaxed);
                    // The first of several takes longest.
                    std::thread::sleep(Duration::from_millis(u64::from(10 - item % 10)));
                    now.fetch_sub(1, Relaxed);
                    Ok(3 * item)
                };
                let mut kept = Vec::new();
                let items: Vec<u32> = (0..10).collect();
                side_by_side(&items, bytes, make, |item, made| {
                    kept.push((item, made));
                    Ok(())
                })
                .unwrap();
                assert_eq!(kept, (0..10).map(|item| (item, 3 * item)).collect::<Vec<_>>());
                assert!(seen.into_inner() <= most);
            }
        });
    }

    #[test]
    fn what_came_before_a_fault_is_kept() {
        let mut kept = Vec::new();
        let fault = |item: u32| if item == 6 { Err(PrepError::usage("six")) } else { Ok(()) };
        let keep = |item, ()| {
            kept.push(item);
            Ok(())
        };
        let items: Vec<u32> = (0..10).collect();
        assert!(side_by_side(&items, u64::MAX, fault, keep).is_err());
        assert_eq!(kept, [0, 1, 2, 3, 4, 5]);
    }
}
