//! `ls-run eval truthfulqa`, `qasper`, `coqa` and `qa`: a model's own answers held against references, and its choice
//! among given answers.
//!
//! Answers are greedy. A prompt that begins as the one before reuses its KV cache; so do the answers to one question.
//! Prompts are computed densely in all systems, as `generate` does, and what is answered by the system: likelihoods
//! of a sparse one token by token, as it decodes. The tokenizer stays loaded, and the memory plan counts it, and room
//! for the longest item.

use super::data::{self, Format, Item, Survey};
use super::journal::Journal;
use super::prompt::{self, Style, Writer};
use super::score::choice::Likelihoods;
use super::score::{Rule, Scorer};
use crate::answer::{Question, SCORED_TOKENS, Speaker, Step};
use crate::args::RunArgs;
use crate::cmd::{extend, plan_json, print_json, print_line, sparse_json};
use crate::exit::UsageError;
use crate::progress::Progress;
use crate::session::{Session, Workload, peak_resident};
use clap::{Args, ValueEnum};
use ls_bundle::ids::ByteCount;
use ls_control::Target;
use ls_engine::memory::MemoryPlan;
use ls_engine::sampler::SamplerOptions;
use ls_engine::tokenizer::Tokenizer;
use serde_json::{Value, json};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Memory for each byte of an item while it is encoded: tokens, their texts and where they stand.
const BYTES_PER_BYTE: u64 = 256;
/// The same for prompts' own words, patterns of the scorers and a record.
const ALLOWANCE: u64 = 4 << 20;
/// Shortest prompt worth an answer.
const MIN_PROMPT_TOKENS: u32 = 16;
/// TruthfulQA's way not to answer counts as true.
const NO_COMMENT: &str = "I have no comment.";

/// A dataset and how its public scorer takes it.
#[derive(Debug)]
pub(crate) struct Task {
    name: &'static str,
    format: Format,
    style: Style,
    rule: Rule,
    /// Most tokens of an answer.
    max_tokens: u32,
    /// Tokens of a prefill pass, where the budget allows.
    prompt_tokens: u32,
    /// Declining to answer is true.
    may_decline: bool,
}

impl Task {
    pub(crate) const TRUTHFULQA: Task = Task {
        name: "truthfulqa",
        format: Format::TruthfulQa,
        style: Style::Primer,
        rule: Rule::Best,
        max_tokens: 50,
        prompt_tokens: 512,
        may_decline: true,
    };
    pub(crate) const QASPER: Task = Task {
        name: "qasper",
        format: Format::Qasper,
        style: Style::Article,
        rule: Rule::Qasper,
        max_tokens: 128,
        prompt_tokens: 2048,
        may_decline: false,
    };
    pub(crate) const COQA: Task = Task {
        name: "coqa",
        format: Format::Coqa,
        style: Style::Story,
        rule: Rule::LeaveOneOut,
        max_tokens: 64,
        prompt_tokens: 1024,
        may_decline: false,
    };
    pub(crate) const QA: Task = Task {
        name: "qa",
        format: Format::Plain,
        style: Style::Plain,
        rule: Rule::Best,
        max_tokens: 64,
        prompt_tokens: 512,
        may_decline: false,
    };
}

/// A half of what can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Half {
    /// Answers that the model writes.
    Generation,
    /// Which of the given answers it finds likelier.
    Choice,
}

/// `ls-run eval` with questions.
#[derive(Args, Debug)]
pub(crate) struct QuestionArgs {
    #[command(flatten)]
    run: RunArgs,
    /// The dataset's file.
    #[arg(long, value_name = "FILE")]
    data: PathBuf,
    /// Only so many questions, spread evenly over the file.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    limit: Option<u64>,
    /// Only one half: answers that the model writes, or its choice among given ones. [default: both, where there are
    /// any]
    #[arg(long, value_enum)]
    only: Option<Half>,
    /// Most tokens of an answer. [default: as the dataset's public scorer has it]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_predict: Option<u32>,
    /// Ask by the model's chat template instead of plain text.
    #[arg(long)]
    chat: bool,
    /// Score given answers token by token, as text is generated. Sparse systems always do.
    #[arg(long)]
    decode: bool,
    /// Write each item's result to a file as soon as it is known, and go on from what is there.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

impl QuestionArgs {
    fn wants(&self, half: Half) -> bool {
        self.only.is_none_or(|only| only == half)
    }
}

/// Runs a task.
pub(crate) fn run(task: &'static Task, args: &QuestionArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    if session.system.columns.is_some_and(|columns| columns.knows_the_future()) {
        let text = "who knows the future is for `eval perplexity` and `divergence`: an answer that is still to be \
                    written has none";
        return Err(UsageError(text.into()).into());
    }
    let survey = data::survey(task.format, &args.data)?;
    if args.only == Some(Half::Choice) && survey.with_incorrect == 0 {
        let text = format!("{} has no incorrect answers to choose among", args.data.display());
        return Err(UsageError(text).into());
    }
    let writer = Writer::new(task.style, args.chat, &session.bundle)?;
    let tokenizer = session.load_tokenizer()?;
    session.reserve(ByteCount(ALLOWANCE + BYTES_PER_BYTE * survey.largest_bytes));
    let by_decode = args.decode || session.system.columns.is_some();
    let scores = args.wants(Half::Choice) && survey.with_incorrect > 0 && !by_decode;
    let scored_tokens = if scores { SCORED_TOKENS } else { 0 };
    let workload = Workload { prompt_tokens: task.prompt_tokens, scored_tokens };
    let plan = session.plan(workload)?;
    let max_tokens = args.n_predict.unwrap_or(task.max_tokens);
    if plan.context < max_tokens + MIN_PROMPT_TOKENS {
        let text =
            format!("a context of {} tokens has no room for answers of {max_tokens}", plan.context);
        return Err(UsageError(text).into());
    }
    let run = identity(task, args, &session, &survey, plan.context, max_tokens);
    let mut journal = Journal::open(args.resume.as_deref(), &run)?;
    let system = session.system.describe();
    let (bundle, engine) = session.start(&plan, workload)?;
    let speaker = Speaker::new(bundle, engine, plan.pass_tokens);
    let (stop, scorer) = (writer.stop(), Scorer::new());
    let mut asking =
        Asking { task, args, writer, tokenizer, speaker, stop, scorer, max_tokens, by_decode };
    ask_all(&mut asking, &survey, &mut journal)?;
    report(&asking, &plan, system, &survey, &journal)
}

/// What a result belongs to.
fn identity(
    task: &Task,
    args: &QuestionArgs,
    session: &Session,
    survey: &Survey,
    context: u32,
    max_tokens: u32,
) -> Value {
    json!({
        "task": task.name,
        "bundle": format!("{:016x}", Target::fingerprint(&session.bundle)),
        "system": session.system.describe(),
        "settings": session.settings(),
        "data_hash": format!("{:016x}", survey.hash),
        "limit": args.limit,
        "only": args.only.map(|half| format!("{half:?}").to_lowercase()),
        "prompts": format!("{:016x}", Writer::mark()),
        "chat": args.chat,
        "decode": args.decode,
        "context": context,
        "max_tokens": max_tokens,
    })
}

/// Whether item `index` of `items` is among `limit` that are spread evenly.
fn is_chosen(index: u64, items: u64, limit: Option<u64>) -> bool {
    let limit = limit.unwrap_or(items).min(items);
    let before = |index: u64| (u128::from(index) * u128::from(limit) / u128::from(items)) as u64;
    before(index) != before(index + 1)
}

/// Asks what is not known yet.
fn ask_all(asking: &mut Asking<'_>, survey: &Survey, journal: &mut Journal) -> anyhow::Result<()> {
    let (args, items) = (asking.args, survey.items);
    let limit = args.limit;
    let all = limit.map_or(items, |limit| limit.min(items));
    let todo = all.saturating_sub(journal.totals().items());
    let mut progress = Progress::of("asking", todo, "questions");
    let mut index = 0;
    asking.task.format.each(&args.data, &mut |item| {
        let this = index;
        index += 1;
        if is_chosen(this, items, limit) && !journal.has(this) {
            journal.add(&asking.ask(this, &item)?)?;
            progress.add(1);
        }
        Ok(())
    })?;
    progress.finish();
    Ok(())
}

/// A model that is asked questions.
struct Asking<'a> {
    task: &'static Task,
    args: &'a QuestionArgs,
    writer: Writer,
    tokenizer: Tokenizer,
    speaker: Speaker,
    stop: Vec<String>,
    scorer: Scorer,
    max_tokens: u32,
    by_decode: bool,
}

impl Asking<'_> {
    /// One item's record.
    fn ask(&mut self, index: u64, item: &Item) -> anyhow::Result<Value> {
        let (started, read_before) = (Instant::now(), self.speaker.engine().bytes_read());
        let mut record = json!({
            "item": index, "place": item.place, "question": item.question,
            "correct": item.correct, "incorrect": item.incorrect,
            "scores": {}, "sums": {},
        });
        if self.args.wants(Half::Generation) {
            self.generate(item, &mut record)?;
        }
        if self.args.wants(Half::Choice) && !item.incorrect.is_empty() {
            self.choose(item, &mut record)?;
        }
        extend(
            &mut record["sums"],
            json!({
                "seconds": started.elapsed().as_secs_f64(),
                "bytes_read": self.speaker.engine().bytes_read() - read_before,
            }),
        );
        Ok(record)
    }

    /// The model's own answer, and how it stands to the references.
    fn generate(&mut self, item: &Item, record: &mut Value) -> anyhow::Result<()> {
        let prompt = self.writer.tokens(item, &self.tokenizer)?;
        let room = self.speaker.engine().context() - self.max_tokens;
        let (tokens, is_cut) = prompt::cut(&prompt.tokens, room as usize);
        let question = Question {
            tokens: &tokens,
            sampler: SamplerOptions::default(),
            max_tokens: self.max_tokens,
            stop: &self.stop,
            ignore_eos: false,
        };
        let mut said = String::new();
        let answer = self.speaker.answer(&question, &mut |step, _| {
            if let Step::Text(piece) = step {
                said.push_str(piece);
            }
            ControlFlow::Continue(())
        })?;
        let prediction = said.trim();
        let mut correct = item.correct.clone();
        if self.task.may_decline && !correct.iter().any(|answer| answer == NO_COMMENT) {
            correct.push(NO_COMMENT.to_owned());
            record["correct_generation"] = json!(correct);
        }
        record["prediction"] = prediction.into();
        record["rule"] = format!("{:?}", self.task.rule).into();
        let scores =
            text_scores(&self.scorer, self.task.rule, prediction, &correct, &item.incorrect);
        extend(&mut record["scores"], scores);
        extend(
            &mut record["sums"],
            json!({
                "prompt_tokens": answer.prompt_tokens,
                "reused_tokens": answer.reused_tokens,
                "generated_tokens": answer.tokens,
                "truncated_items": u8::from(is_cut),
            }),
        );
        Ok(())
    }

    /// Likelihoods of the given answers.
    fn choose(&mut self, item: &Item, record: &mut Value) -> anyhow::Result<()> {
        let prompt = self.writer.tokens(item, &self.tokenizer)?;
        let mut is_cut = false;
        let mut of = |answer: &str| -> anyhow::Result<f64> {
            let (before, tokens) = self.writer.answer_tokens(&prompt, answer, &self.tokenizer)?;
            let context = self.speaker.engine().context() as usize;
            if tokens.len() + MIN_PROMPT_TOKENS as usize > context {
                let text =
                    format!("{}: an answer does not fit the context of {context}", item.place);
                return Err(UsageError(text).into());
            }
            // The last token needs no place: nothing follows it.
            let (prompt, cut) = prompt::cut(&prompt.tokens[..before], context + 1 - tokens.len());
            is_cut |= cut;
            Ok(self.speaker.log_likelihood(&prompt, &tokens, self.by_decode)?)
        };
        let mut all = |answers: &[String]| -> anyhow::Result<Vec<f64>> {
            answers.iter().map(|answer| of(answer)).collect()
        };
        let (correct, incorrect) = (all(&item.correct)?, all(&item.incorrect)?);
        let mut known = |wanted: &Option<String>, answers: &[String], logs: &[f64]| {
            let Some(wanted) = wanted else { return Ok(None) };
            match answers.iter().position(|answer| answer == wanted) {
                Some(index) => Ok(Some(logs[index])),
                None => of(wanted).map(Some),
            }
        };
        let best = known(&item.best, &item.correct, &correct)?.unwrap_or(correct[0]);
        let best_incorrect = known(&item.best_incorrect, &item.incorrect, &incorrect)?;
        record["log_likelihoods"] = json!({
            "best": best, "correct": correct, "incorrect": incorrect, "best_incorrect": best_incorrect,
        });
        let given = Likelihoods { best, correct, incorrect, best_incorrect };
        extend(&mut record["scores"], json!({"mc1": given.mc1(), "mc2": given.mc2()}));
        if let Some(binary) = given.binary() {
            record["scores"]["mc_binary"] = binary.into();
        }
        let cut_before = record["sums"]["truncated_items"].as_u64().unwrap_or(0);
        record["sums"]["truncated_items"] = cut_before.max(u64::from(is_cut)).into();
        Ok(())
    }
}

/// Scores of a text. Where there are incorrect answers a text is as good as it is nearer to the correct ones.
fn text_scores(
    scorer: &Scorer,
    rule: Rule,
    text: &str,
    correct: &[String],
    incorrect: &[String],
) -> Value {
    let f1 = scorer.f1(text, correct, rule);
    if incorrect.is_empty() {
        return json!({"f1": f1, "exact_match": scorer.exact(text, correct, rule)});
    }
    let bleu = scorer.bleu(text, correct);
    let (f1_incorrect, bleu_incorrect) =
        (scorer.f1(text, incorrect, rule), scorer.bleu(text, incorrect));
    json!({
        "f1": f1,
        "f1_incorrect": f1_incorrect,
        "f1_difference": f1 - f1_incorrect,
        "f1_accuracy": u8::from(f1 > f1_incorrect),
        "bleu": bleu,
        "bleu_incorrect": bleu_incorrect,
        "bleu_difference": bleu - bleu_incorrect,
        "bleu_accuracy": u8::from(bleu > bleu_incorrect),
    })
}

/// What a likelihood's choice is called wherever it is shown.
const SUBSTITUTE: &str = "substitute for a judge model";

fn report(
    asking: &Asking<'_>,
    plan: &MemoryPlan,
    system: Value,
    survey: &Survey,
    journal: &Journal,
) -> anyhow::Result<()> {
    let (totals, engine) = (journal.totals(), asking.speaker.engine());
    let truncated = totals.sum("truncated_items");
    if asking.args.json {
        let mut object = json!({
            "task": asking.task.name,
            "items": totals.items(),
            "items_of_file": survey.items,
            "left_out_items": survey.left_out,
            "truncated_items": truncated as u64,
            "resumed_items": journal.resumed(),
            "data_hash": format!("{:016x}", survey.hash),
            "chat": asking.args.chat,
            "max_tokens": asking.max_tokens,
            "by_decode": asking.by_decode,
            "prompt_tokens": totals.sum("prompt_tokens") as u64,
            "generated_tokens": totals.sum("generated_tokens") as u64,
            "seconds": totals.sum("seconds"),
            "bytes_read": totals.sum("bytes_read") as u64,
            "peak_rss_bytes": peak_resident()?,
        });
        if totals.mean("mc1").is_some() {
            object["mc_is"] = SUBSTITUTE.into();
        }
        extend(&mut object, totals.means());
        extend(&mut object, plan_json(plan));
        extend(&mut object, system);
        extend(&mut object, sparse_json(engine));
        return print_json(&object);
    }
    let system = system["system"].as_str().unwrap_or_default().to_owned();
    print_line(&format!(
        "{}: {} of {} questions, {system}, {:.1} s",
        asking.task.name,
        totals.items(),
        survey.items,
        totals.sum("seconds")
    ))?;
    if truncated > 0.0 {
        let context = plan.context;
        print_line(&format!(
            "{truncated} prompts lost their middle to a context of {context} tokens"
        ))?;
    }
    if survey.left_out > 0 {
        print_line(&format!("{} questions of the file are for other scores", survey.left_out))?;
    }
    let means = totals.means();
    for name in totals.names() {
        let stderr = means[format!("{name}_stderr")].as_f64();
        let spread = stderr.map_or(String::new(), |stderr| format!(" ± {stderr:.4}"));
        let note = if name.starts_with("mc") { format!("  ({SUBSTITUTE})") } else { String::new() };
        let mean = totals.mean(name).unwrap_or(0.0);
        print_line(&format!("{name:<16} {mean:.4}{spread}{note}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_as_good_as_it_is_nearer_to_what_is_correct() {
        let list = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let (correct, incorrect) = (list(&["w x y z", "a b c d"]), list(&["b c d e", "no"]));
        let of = |text: &str| text_scores(&Scorer::new(), Rule::Best, text, &correct, &incorrect);
        let near = of("b c d");
        // All of it is in "b c d" of "a b c d" without its article, three of four in the other.
        let wanted = json!({"f1": 1.0, "f1_incorrect": 6.0 / 7.0, "f1_difference": 1.0 - 6.0 / 7.0, "f1_accuracy": 1});
        wanted.as_object().unwrap().iter().for_each(|(name, value)| {
            assert_eq!(near[name], *value, "{name}");
        });
        assert_eq!((near["bleu"].as_f64(), &near["bleu_accuracy"]), (Some(0.0), &json!(0)));
        let same = of("b c d e");
        assert_eq!((&same["bleu_incorrect"], &same["bleu_accuracy"]), (&json!(1.0), &json!(0)));
        let difference = same["bleu"].as_f64().unwrap() - 1.0;
        assert_eq!(same["bleu_difference"].as_f64(), Some(difference));
        assert!(difference > -1.0 && same["f1_difference"].as_f64().unwrap() < 0.0, "{same}");
        assert_eq!(of("neither")["f1_accuracy"], 0, "as near is not nearer");
        let plain = text_scores(&Scorer::new(), Rule::Best, "W x, y z", &correct, &[]);
        assert_eq!(plain, json!({"f1": 1.0, "exact_match": 1.0}));
    }

    #[test]
    fn a_limit_takes_items_from_all_over_the_file() {
        let chosen =
            |items, limit| (0..items).filter(|&i| is_chosen(i, items, limit)).collect::<Vec<_>>();
        assert_eq!(chosen(10, None).len(), 10);
        assert_eq!(chosen(10, Some(3)), [3, 6, 9]);
        assert_eq!(chosen(10, Some(50)).len(), 10);
        assert_eq!(
            (1..200).filter(|&n| chosen(197, Some(n)).len() as u64 != n.min(197)).count(),
            0
        );
    }
}
