//! [`PANELS`]: the paper's tables and figures, and [`fill`], which puts what was measured into them.

use crate::Result;
use crate::job::{Job, Reading, Stamps};
use crate::ledger::{Entry, Ledger};
use crate::runner::Programs;
use serde::Serialize;
use std::collections::BTreeMap;

/// How a panel looks.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum Shape {
    /// Series over numbers.
    Lines {
        /// The axis below.
        x: &'static str,
        /// The axis beside.
        y: &'static str,
    },
    /// Series are rows, ticks are columns.
    Table,
}

/// A table or figure of the paper, or one of ours beside them.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Panel {
    /// For links and files.
    pub id: &'static str,
    /// Its head.
    pub title: &'static str,
    /// How it looks.
    #[serde(flatten)]
    pub shape: Shape,
    /// What is measured here, and what differs from the paper.
    pub here: &'static str,
    /// What the paper reports, on its devices.
    pub paper: &'static str,
    /// Why there is nothing, if nothing was measured.
    pub without: &'static str,
}

impl Panel {
    /// The panel with this id.
    #[must_use]
    pub fn named(id: &str) -> Option<&'static Panel> {
        PANELS.iter().find(|panel| panel.id == id)
    }
}

const TABLE: Shape = Shape::Table;
const RATE: &str = "tokens/s";
const SHARE: &str = "memory, % of the bundle";
const NO_GPU: &str = "Needs an NVIDIA GPU, which this machine has not. What was measured on one, with its commands: \
                      kernels/cuda/RESULTS.md.";
const PENDING: &str = "Not measured yet: the same command goes on.";
const ALL_FAILED: &str = "No command for it ended well; see below why.";
const NO_DATA: &str = "The datasets are not here: `ls-prep datasets fetch` says where they are from, and --qasper, --truthfulqa \
                       and --coqa take the files.";

const fn lines(x: &'static str, y: &'static str) -> Shape {
    Shape::Lines { x, y }
}

/// All panels, in the order of the paper; ours follow those that they belong to.
pub const PANELS: &[Panel] = &[
    Panel {
        id: "table-1",
        title: "Table 1. Computation of a layer beside the prediction for it",
        shape: TABLE,
        here: "Microseconds a layer and token on this processor, all weights in memory, four neurons of five left out: decode \
               without predictions, and the predictions of the two kinds, each on one thread. The paper computes on a GPU.",
        paper: "On a Jetson AGX Orin a two-layer network on the CPU takes longer than the sparse FFN on the GPU.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-2",
        title: "Table 2. Quality at several sparsities",
        shape: TABLE,
        here: "Token F1 on Qasper (contexts cut in the middle to what fits) and CoQA, and on TruthfulQA F1 against its reference \
               answers with MC1 and MC2 beside: a substitute for the paper's judge. The first items of each set.",
        paper: "Nearly the dense model's scores for all systems on models of 7 billion weights.",
        without: NO_DATA,
    },
    Panel {
        id: "perplexity",
        title: "Beside Table 2. Perplexity of each system, by share of neurons left out",
        shape: lines("neurons left out, %", "perplexity"),
        here: "Windows of 512 tokens, decoded one by one, the second half of each scored. A speed below is worth only what its \
               row has here.",
        paper: "Not reported.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-3",
        title: "Table 3. What cutting a layer into segments costs",
        shape: TABLE,
        here: "Percent more than one stage, for an FFN layer of Mistral 7B's shape at 80 % sparsity on this machine's GPU.",
        paper: "At 16 segments less than half of the computation's time, where device synchronisation costs more than all of it.",
        without: NO_GPU,
    },
    Panel {
        id: "figure-3",
        title: "Figure 3. What synchronisation costs, by how often",
        shape: lines("segments", "µs"),
        here: "The same layer: a kernel a stage, waited for in three ways, and one kernel that is fed through flags while the host \
               runs ahead, or is one or two stages behind.",
        paper: "Existing primitives make an FFN at 80 % sparsity several times slower when used often.",
        without: NO_GPU,
    },
    Panel {
        id: "figure-4a",
        title: "Figure 4 (a). Misses by layer, half of the weights in memory",
        shape: lines("layer", "misses, % of requests"),
        here: "`leanstream`; requests that found their block neither kept nor read ahead.",
        paper: "Miss rates vary widely from layer to layer (Mistral 7B).",
        without: ALL_FAILED,
    },
    Panel {
        id: "figure-4b",
        title: "Figure 4 (b). Misses of the first layer, by prompt",
        shape: lines("prompt", "misses, % of requests"),
        here: "The same, for parts of the calibration texts.",
        paper: "Miss rates of a layer vary from prompt to prompt.",
        without: ALL_FAILED,
    },
    Panel {
        id: "steadiness",
        title: "Beside all speeds. One command over the whole run",
        shape: lines("place in the run, %", RATE),
        here: "Dense decode at the middle budget of Figure 8, again and again between the other commands. It shows what else the \
               machine has to do: speeds whose difference is within this spread are not different.",
        paper: "Not reported.",
        without: ALL_FAILED,
    },
    Panel {
        id: "figure-8",
        title: "Figure 8. Tokens a second, by memory",
        shape: lines(SHARE, RATE),
        here: "Decode after a short prompt, all systems by turns; memory is all that the process may hold, held by a cgroup where \
               the system gives one. Rows whose perplexity is above 1.5 times dense count for no claim.",
        paper: "At half of the weights up to 2.2 times PowerInfer-2; its speed there with 5.9 times less memory.",
        without: ALL_FAILED,
    },
    Panel {
        id: "bound",
        title: "Beside Figure 8. Share of what disk and memory allow",
        shape: lines(SHARE, "share of the bound, %"),
        here: "The bound is the larger of the time to read what was read and the time to touch what was touched, by the disk's \
               and memory's bandwidth in the same run. Small reads reach no disk's bandwidth, so sparse rows stay below it.",
        paper: "Not reported.",
        without: ALL_FAILED,
    },
    Panel {
        id: "bytes",
        title: "Beside Figure 8. Read for a token",
        shape: lines(SHARE, "MB"),
        here: "Bytes that the store counted.",
        paper: "Not reported.",
        without: ALL_FAILED,
    },
    Panel {
        id: "peers",
        title: "Beside Figure 8. Other programs on the same model",
        shape: lines(SHARE, RATE),
        here: "The same weights in the same cgroup, by turns with ours, with as many threads and as long a prompt: llama.cpp reads \
               them through the page cache (mmap), AirLLM layer by layer, mistral.rs into memory.",
        paper: "Not reported.",
        without: "No other program is here, or no file for it: `make bench-peers` builds and installs what it can; --peers and \
                  --peer-model take what it leaves.",
    },
    Panel {
        id: "figure-9",
        title: "Figure 9. Tokens a second, by dataset",
        shape: TABLE,
        here: "Texts of different kinds, a fifth of the weights in memory. Where the paper's datasets are not given these are parts \
               of the calibration texts: a substitute.",
        paper: "Differs by model and dataset, as misses do.",
        without: ALL_FAILED,
    },
    Panel {
        id: "figure-10",
        title: "Figure 10. Tokens a second, by share of neurons left out",
        shape: lines("neurons left out, %", RATE),
        here: "At the middle budget of Figure 8.",
        paper: "LeanStream leads at all sparsities.",
        without: ALL_FAILED,
    },
    Panel {
        id: "figure-11",
        title: "Figure 11. What priorities bring, one after the other",
        shape: TABLE,
        here: "A fifth of the weights in memory, four neurons of five left out: DejaVu's row with our predictor, then the order of \
               computation, of loading, and what stays in memory.",
        paper: "The cache brings most.",
        without: ALL_FAILED,
    },
    Panel {
        id: "refinement",
        title: "Beside Figure 11. Reading ahead and refinement, on and off",
        shape: lines(SHARE, RATE),
        here: "`leanstream` as it is, without reading ahead, and predicting once a layer.",
        paper: "Not reported apart.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-4",
        title: "Table 4. Misses by policy of the cache, % of requests",
        shape: TABLE,
        here: "The same tokens and predictor with each policy; Belady's knows the future. \"ahead\": hits of blocks that were read \
               ahead, which are no merit of the cache.",
        paper: "At 25 %: LeanStream 11, PowerInfer-2 56, LRU 81; at 50 %: LeanStream 5.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-5",
        title: "Table 5. Who cuts layers into segments",
        shape: TABLE,
        here: "A fifth of the weights in memory; after `ls-run tune`; by turns on one engine.",
        paper: "Dynamic control beats the best static plan.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-6",
        title: "Table 6. Predictors",
        shape: TABLE,
        here: "On windows that they did not learn from, means over layers: share of importance that a fetch of a fifth captures, the \
               strongest tenth found, what must be fetched beyond a fifth for 95 %; size and time for a layer of hidden size \
               4096 and 14336 neurons.",
        paper: "23 to 24 MB (networks 1.1 to 1.8 GB, BNN 106 to 130 MB), below 100 µs, redundancy 12 to 14 %.",
        without: "The folder of artifacts that the bundle was made from is not here (--artifacts).",
    },
    Panel {
        id: "figure-12",
        title: "Figure 12. Predictions as a layer goes on",
        shape: lines("stages of eight that have run", "importance captured, %"),
        here: "Means over layers, windows that the predictor did not learn from; in order of priority and of the file.",
        paper: "Both rise; by priority most early.",
        without: "The model's file and the calibration texts are wanted (--source, --text).",
    },
    Panel {
        id: "figure-13",
        title: "Figure 13. Prompt and answer, by length of the prompt",
        shape: lines("tokens of the prompt", "s"),
        here: "At the middle budget; `leanstream+base` where there is a base.",
        paper: "Decode dominates, also at 256 tokens of each.",
        without: ALL_FAILED,
    },
    Panel {
        id: "table-7",
        title: "Table 7. Energy and temperature",
        shape: TABLE,
        here: "Where the system exposes them (RAPL, INA sensors, thermal zones), over the runs of Figure 8: not two hours.",
        paper: "Slightly more energy a token than PowerInfer-2, no throttling in two hours.",
        without: "This machine exposes neither energy nor temperatures.",
    },
    Panel {
        id: "guard",
        title: "Quality first. Settings that the guard found for 1, 5 and 10 %",
        shape: TABLE,
        here: "What `ls-prep all --quality` would choose, on held-out text: share of neurons run exactly, bytes of a token, perplexity \
               over dense.",
        paper: "Not reported.",
        without: "No search of the guard is among the artifacts (`ls-prep guard`).",
    },
];

/// Repetitions of one point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Where.
    pub x: f64,
    /// The column's head, in a table.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub tick: String,
    /// Median.
    pub y: f64,
    /// Smallest.
    pub low: f64,
    /// Largest.
    pub high: f64,
    /// How many were measured.
    pub repetitions: usize,
    /// What gave it.
    pub command: String,
}

/// A line of a plot, or a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Series {
    /// Its name.
    pub name: String,
    /// By x.
    pub points: Vec<Point>,
}

/// A program of others that is not measured, as it is not here.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Absent {
    /// Its name.
    pub name: &'static str,
    /// What was tried.
    pub why: String,
}

/// A panel for one model.
#[derive(Clone, Debug, Serialize)]
pub struct Filled {
    /// Which.
    #[serde(flatten)]
    pub panel: Panel,
    /// The model's name.
    pub model: String,
    /// What was measured, in the order of the matrix.
    pub series: Vec<Series>,
    /// Commands that gave nothing, and what they said.
    pub failed: Vec<(String, String)>,
    /// Programs that would belong here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub absent: Vec<Absent>,
    /// Why there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub missing: Option<&'static str>,
}

impl Filled {
    /// The smallest, the largest and the number of all points.
    #[must_use]
    pub fn spread(&self) -> Option<(f64, f64, usize)> {
        let points = || self.series.iter().flat_map(|series| &series.points);
        let low = points().map(|point| point.low).min_by(f64::total_cmp)?;
        let high = points().map(|point| point.high).max_by(f64::total_cmp)?;
        Some((low, high, points().count()))
    }
}

/// Readings of the same point.
#[derive(Default)]
struct Gathered {
    values: Vec<f64>,
    tick: String,
    command: String,
}

/// Series by name in order of appearance, points by the bits of x (none is negative, so that their order is that of x).
#[derive(Default)]
struct Gathering {
    series: Vec<(String, BTreeMap<u64, Gathered>)>,
    failed: Vec<(String, String)>,
    /// Whether a job has not run yet.
    pending: bool,
}

impl Gathering {
    fn add(&mut self, reading: Reading, command: &str) {
        let known = self.series.iter().position(|(name, _)| *name == reading.series);
        let index = known.unwrap_or_else(|| {
            self.series.push((reading.series.clone(), BTreeMap::new()));
            self.series.len() - 1
        });
        let point = self.series[index].1.entry(reading.x.max(0.0).to_bits()).or_default();
        point.values.push(reading.y);
        point.tick = reading.tick;
        command.clone_into(&mut point.command);
    }

    fn series(self) -> Vec<Series> {
        let point = |(x, mut gathered): (u64, Gathered)| {
            gathered.values.sort_by(f64::total_cmp);
            let values = &gathered.values;
            Point {
                x: f64::from_bits(x),
                tick: gathered.tick,
                y: median(values),
                low: values[0],
                high: values[values.len() - 1],
                repetitions: values.len(),
                command: gathered.command,
            }
        };
        let series = |(name, points): (String, BTreeMap<u64, Gathered>)| Series {
            name,
            points: points.into_iter().map(point).collect(),
        };
        self.series.into_iter().map(series).collect()
    }
}

/// Of sorted values; the mean of the middle two.
fn median(values: &[f64]) -> f64 {
    f64::midpoint(values[(values.len() - 1) / 2], values[values.len() / 2])
}

/// All panels of the models that `jobs` are about, with what the ledger has.
pub fn fill(jobs: &[Job], programs: &Programs, ledger: &Ledger) -> Result<Vec<Filled>> {
    let mut stamps = Stamps::default();
    filled(jobs, &programs.absent(), |job| Ok(ledger.get(&job.key(programs, &mut stamps)?)))
}

/// All panels of the models that `jobs` are about, with what came of each job; `entry_of` has none of one that has not run.
pub fn filled<'a>(
    jobs: &[Job],
    absent: &[Absent],
    mut entry_of: impl FnMut(&Job) -> Result<Option<&'a Entry>>,
) -> Result<Vec<Filled>> {
    let mut models: Vec<&str> = Vec::new();
    let mut gatherings: BTreeMap<(&str, &str), Gathering> = BTreeMap::new();
    for job in jobs {
        if !models.contains(&job.model.as_str()) {
            models.push(&job.model);
        }
        let entry = entry_of(job)?;
        for feed in &job.feeds {
            let gathering = gatherings.entry((&job.model, feed.panel)).or_default();
            let Some(entry) = entry else {
                gathering.pending = true;
                continue;
            };
            let failure = entry.error.as_ref().map(|error| (entry.command.clone(), error.clone()));
            if let Some(failure) = failure {
                if !gathering.failed.contains(&failure) {
                    gathering.failed.push(failure);
                }
                continue;
            }
            let readings = (feed.read)(entry).into_iter().filter(|reading| reading.y.is_finite());
            readings.for_each(|reading| gathering.add(reading, &entry.command));
        }
    }
    let mut filled = Vec::new();
    for model in models {
        for panel in PANELS {
            let gathering = gatherings.remove(&(model, panel.id)).unwrap_or_default();
            let (failed, pending) = (gathering.failed.clone(), gathering.pending);
            let series = gathering.series();
            let why = if pending { PENDING } else { panel.without };
            let missing = series.is_empty().then_some(why);
            let absent = if panel.id == "peers" { absent.to_vec() } else { Vec::new() };
            let (panel, model) = (*panel, model.to_owned());
            filled.push(Filled { panel, model, series, failed, absent, missing });
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Program;

    #[test]
    fn medians() {
        assert_eq!(median(&[1.0]), 1.0);
        assert_eq!(median(&[1.0, 2.0]), 1.5);
        assert_eq!(median(&[1.0, 2.0, 10.0]), 2.0);
    }

    #[test]
    fn repetitions_become_a_median_and_its_spread_in_the_order_of_x() {
        let mut gathering = Gathering::default();
        let readings =
            [(50.0, 3.0), (9.0, 5.0), (50.0, 1.0), (100.0, 4.0), (50.0, 1.5), (50.0, 9.0)];
        for (x, y) in readings {
            let (series, tick) = ("dense".to_owned(), format!("at {x}"));
            gathering.add(Reading { series, x, tick, y }, &format!("gave {y}"));
        }
        let other = Reading { series: "a".into(), x: 1.0, tick: String::new(), y: 2.0 };
        gathering.add(other, "other");
        let series = gathering.series();
        let names: Vec<&str> = series.iter().map(|series| series.name.as_str()).collect();
        assert_eq!(names, ["dense", "a"], "in the order of the matrix");
        let xs: Vec<f64> = series[0].points.iter().map(|point| point.x).collect();
        assert_eq!(xs, [9.0, 50.0, 100.0]);
        let wanted = Point {
            x: 50.0,
            tick: "at 50".into(),
            y: 2.25,
            low: 1.0,
            high: 9.0,
            repetitions: 4,
            command: "gave 9".into(),
        };
        assert_eq!(series[0].points[1], wanted);
    }

    #[test]
    fn what_is_no_number_is_no_point() {
        let values = [1.0, f64::INFINITY, f64::NAN, -f64::INFINITY];
        let jobs = values.map(|y| {
            let job = Job::new(Program::LsRun, "model", Vec::new(), Vec::new());
            job.cell("figure-8", "dense", (50.0, ""), move |_| Some(y))
        });
        let entry = Entry::printed(Vec::new());
        let all = filled(&jobs, &[], |_| Ok(Some(&entry))).unwrap();
        let figure_8 = all.iter().find(|filled| filled.panel.id == "figure-8").unwrap();
        let point = &figure_8.series[0].points[0];
        assert_eq!((point.y, point.low, point.high, point.repetitions), (1.0, 1.0, 1.0, 1));
    }

    #[test]
    fn ids_are_unique_and_the_papers_numbers_are_complete() {
        let ids: std::collections::BTreeSet<_> = PANELS.iter().map(|panel| panel.id).collect();
        assert_eq!(ids.len(), PANELS.len());
        let tables = (1..=7).map(|n| format!("table-{n}"));
        let figures = ["3", "4a", "4b", "8", "9", "10", "11", "12", "13"];
        let figures = figures.iter().map(|n| format!("figure-{n}"));
        tables.chain(figures).for_each(|id| assert!(Panel::named(&id).is_some(), "{id}"));
    }
}
