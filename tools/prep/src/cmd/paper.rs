//! `ls-prep paper`: the paper's tables and figures on this machine.

use super::print;
use indicatif::{ProgressBar, ProgressStyle};
use ls_bundle::files;
use ls_paper::{Inputs, Ledger, Machine, Model, PaperError, Program, Programs};
use ls_prep::error::{PrepError, Result};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  ls-prep paper smollm2.lsb --source smollm2.f16.gguf --text datasets/text/*.txt --out report --quick
  ls-prep paper smollm2.lsb wide.lsb --text wiki.txt --truthfulqa truthfulqa.csv --out report
  ls-prep paper smollm2.lsb --text wiki.txt --out again --panels table-4,figure-11
  ls-prep paper smollm2.lsb --text wiki.txt --out report --report-only";

/// Parts of the texts that systems decode.
const PROMPTS: usize = 6;
/// What an NVIDIA driver makes, on machines with a card and on Jetson boards.
const GPUS: [&str; 2] = ["/proc/driver/nvidia/version", "/dev/nvhost-gpu"];
/// Bytes of a part: more tokens than any row wants.
const PROMPT_BYTES: usize = 1 << 16;

/// Measures the paper's tables and figures with bundles of `ls-prep all`, and writes a report.
///
/// Runs `ls-run` some hundred times, all systems by turns, and keeps each result in OUT/results.jsonl: stopped anywhere and
/// started again, it goes on. Writes OUT/report.html, which any browser shows, and OUT/panels.json with the points and the
/// command of each. Best on a machine that does nothing else; as root, memory is held by cgroups too.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PaperArgs {
    /// Bundles of `ls-prep all`, with the baseline predictor ([pack] baseline = true) for all systems to run
    #[arg(required = true)]
    bundles: Vec<PathBuf>,
    /// Folder of results and report
    #[arg(long, short, value_name = "DIR")]
    out: PathBuf,
    /// Texts that are decoded; those that the bundles were prepared with, for Figure 12
    #[arg(long, value_name = "FILE", num_args = 1.., required = true)]
    text: Vec<PathBuf>,
    /// The models' files that the bundles were made of, in their order: for Figure 12
    #[arg(long, value_name = "FILE", num_args = 1..)]
    source: Vec<PathBuf>,
    /// The same weights as GGUF files in the bundles' precision, for llama.cpp
    #[arg(long, value_name = "FILE", num_args = 1..)]
    peer_model: Vec<PathBuf>,
    /// Recipe that the bundles were made with
    #[arg(long, value_name = "NAME|FILE", default_value = "quick")]
    recipe: String,
    /// Folder of the artifacts that they were made from
    #[arg(long, value_name = "DIR", default_value = "artifacts")]
    artifacts: PathBuf,
    /// TruthfulQA.csv
    #[arg(long, value_name = "FILE")]
    truthfulqa: Option<PathBuf>,
    /// Qasper, a paper with its questions a line
    #[arg(long, value_name = "FILE")]
    qasper: Option<PathBuf>,
    /// CoQA's development set
    #[arg(long, value_name = "FILE")]
    coqa: Option<PathBuf>,
    /// Folder that `make bench-peers` leaves: programs to compare with, and why others are missing
    #[arg(long, value_name = "DIR")]
    peers: Option<PathBuf>,
    /// llama.cpp's llama-bench, if it is elsewhere
    #[arg(long, value_name = "FILE")]
    llama_bench: Option<PathBuf>,
    /// The runtime [default: ls-run beside this program]
    #[arg(long, value_name = "FILE")]
    ls_run: Option<PathBuf>,
    /// Measure only these panels, by their ids in panels.json (figure-8,table-4)
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_parser = panel)]
    panels: Vec<String>,
    /// Fewer points and repetitions
    #[arg(long)]
    quick: bool,
    /// Run nothing: make the report of what has been measured
    #[arg(long)]
    report_only: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// A panel's id.
fn panel(id: &str) -> std::result::Result<String, String> {
    let known = || ls_paper::PANELS.iter().map(|panel| panel.id).collect::<Vec<_>>().join(", ");
    match ls_paper::PANELS.iter().any(|panel| panel.id == id) {
        true => Ok(id.to_owned()),
        false => Err(format!("there are {}", known())),
    }
}

/// Runs the command.
pub(crate) fn run(args: &PaperArgs) -> Result<()> {
    let start = Instant::now();
    let io = |path: &Path| {
        let path = path.to_owned();
        move |source| PrepError::io(&path, source)
    };
    std::fs::create_dir_all(&args.out).map_err(io(&args.out))?;
    let own = std::env::current_exe().map_err(io(Path::new("this program")))?;
    let ls_run = args.ls_run.clone().unwrap_or_else(|| own.with_file_name("ls-run"));
    let programs = Programs::new(&ls_run, &own, peers(args)).map_err(paper)?;
    let inputs = inputs(args, &programs)?;
    let jobs = ls_paper::jobs(&inputs);
    let mut ledger = Ledger::open(&args.out.join("results.jsonl")).map_err(paper)?;
    let ran = if args.report_only {
        0
    } else {
        let bar = bar(jobs.len());
        let ran = ls_paper::run(&jobs, &programs, &mut ledger, |_, done, command| {
            bar.set_position(done as u64);
            bar.set_message(command.to_owned());
        });
        bar.finish_and_clear();
        ran.map_err(paper)?
    };
    let mut filled = ls_paper::fill(&jobs, &programs, &ledger).map_err(paper)?;
    let asked = |id: &str| args.panels.is_empty() || args.panels.iter().any(|panel| panel == id);
    filled.retain(|filled| asked(filled.panel.id));
    let machine = Machine::this();
    let panels = json!({"machine": machine, "quick": args.quick, "panels": filled});
    let pages = [
        ("panels.json", serde_json::to_string_pretty(&panels).expect("plain data")),
        ("report.html", ls_paper::page(&filled, &machine, &notes(args, &inputs))),
    ];
    for (name, text) in &pages {
        write(&args.out.join(name), text.as_bytes())?;
    }
    let (with, report) = (
        filled.iter().filter(|panel| panel.missing.is_none()).count(),
        args.out.join("report.html"),
    );
    let failed: usize = filled.iter().map(|panel| panel.failed.len()).sum();
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        return print(json!({
            "report": report, "panels": filled.len(), "panels_with_points": with, "failed": failed,
            "jobs": jobs.len(), "ran": ran, "seconds": seconds,
        }));
    }
    print(format!(
        "{}: {with} of {} panels have points; {ran} of {} jobs ran, {failed} gave nothing; {seconds:.0} s",
        report.display(),
        filled.len(),
        jobs.len()
    ))
}

fn paper(error: PaperError) -> PrepError {
    match error {
        PaperError::Io { place, source } => PrepError::io(Path::new(&place), source),
        PaperError::Corrupt { place, problem } => PrepError::corrupt(place, problem),
    }
}

/// Replaces the file when the new one is complete.
fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    files::replace(path, bytes).map_err(|source| PrepError::io(path, source))
}

fn bar(jobs: usize) -> ProgressBar {
    let template = "measuring [{bar:30}] {pos}/{len} jobs, {eta} left: {wide_msg}";
    let style = ProgressStyle::with_template(template).expect("the template is well formed");
    let bar = ProgressBar::new(jobs as u64).with_style(style);
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn inputs(args: &PaperArgs, programs: &Programs) -> Result<Inputs> {
    let models = args.bundles.iter().enumerate().map(|(place, bundle)| {
        let length = bundle.metadata().map_err(|source| PrepError::io(bundle, source))?.len();
        Ok(Model {
            name: bundle.file_stem().unwrap_or_default().to_string_lossy().into_owned(),
            bundle: bundle.clone(),
            bundle_bytes: length,
            source: args.source.get(place).cloned(),
            peer: args.peer_model.get(place).cloned(),
            recipe: args.recipe.clone(),
            artifacts: args.artifacts.clone(),
        })
    });
    Ok(Inputs {
        models: models.collect::<Result<_>>()?,
        prompts: prompts(args)?,
        calibration: args.text.clone(),
        truthfulqa: args.truthfulqa.clone(),
        qasper: args.qasper.clone(),
        coqa: args.coqa.clone(),
        peers: programs.peers().collect(),
        gpu: GPUS.iter().any(|path| Path::new(path).exists()),
        panels: args.panels.clone(),
        quick: args.quick,
    })
}

/// Where each program of others is, or why it is not here.
fn peers(args: &PaperArgs) -> Vec<(Program, std::result::Result<PathBuf, String>)> {
    let place = |peer: Program| {
        if let (Program::LlamaBench, Some(file)) = (peer, &args.llama_bench) {
            return Ok(file.clone());
        }
        let Some(folder) = &args.peers else {
            return Err("not looked for; `make bench-peers` installs what it can".to_owned());
        };
        let file = folder.join(peer.name());
        if file.is_file() {
            return Ok(file);
        }
        let why = std::fs::read_to_string(folder.join(format!("{}.missing", peer.name())));
        let none = || format!("there is no {}", file.display());
        Err(why.ok().map_or_else(none, |why| why.trim().to_owned()))
    };
    Program::PEERS.map(|peer| (peer, place(peer))).into()
}

/// Parts of the texts, evenly from all of them, as files: what a row decodes shall not change when texts grow.
fn prompts(args: &PaperArgs) -> Result<Vec<PathBuf>> {
    let folder = args.out.join("prompts");
    std::fs::create_dir_all(&folder).map_err(|source| PrepError::io(&folder, source))?;
    let mut parts = Vec::new();
    for place in 0..PROMPTS {
        let path = &args.text[place % args.text.len()];
        let text = std::fs::read_to_string(path).map_err(|source| PrepError::io(path, source))?;
        // Another part of the same text when texts are few; the middle is rarely a table of contents.
        let round = place / args.text.len() + 1;
        let begin = text.floor_char_boundary(text.len() / 2 / round);
        let end = text.floor_char_boundary((begin + PROMPT_BYTES).min(text.len()));
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let name = if round == 1 { format!("{stem}.txt") } else { format!("{stem}-{round}.txt") };
        let part = folder.join(name);
        if std::fs::read(&part).ok().as_deref() != Some(&text.as_bytes()[begin..end]) {
            write(&part, &text.as_bytes()[begin..end])?;
        }
        parts.push(part);
    }
    Ok(parts)
}

/// What differs from the paper as a whole.
fn notes(args: &PaperArgs, inputs: &Inputs) -> Vec<String> {
    let mut notes = vec![
        "The paper measures models of 7 billion weights on a Jetson AGX Orin, a Jetson AGX Xavier and a phone; here the models \
         and the machine are those named. Nothing is simulated."
            .to_owned(),
    ];
    if args.quick {
        notes.push("A quick run: fewer points, tokens and repetitions.".to_owned());
    }
    if inputs.qasper.is_none() || inputs.truthfulqa.is_none() || inputs.coqa.is_none() {
        notes.push(
            "Not all of the paper's datasets were given; what is missing is said where it is."
                .to_owned(),
        );
    }
    notes
}
