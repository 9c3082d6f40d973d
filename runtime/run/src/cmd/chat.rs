//! `ls-run chat`: a conversation on a terminal, or over pipes.
//!
//! Standard output has the model's answers and nothing else; all that is said about them goes to standard error. With a
//! terminal there is line editing with a history of this conversation; without one each line is a turn, and there are
//! no colours. The tokenizer stays loaded, and the memory plan counts it. Ctrl-C ends an answer; what was said of it
//! stays in the conversation.

mod input;

use crate::answer::{Answer, End, Question, Speaker, Step};
use crate::args::{RunArgs, parse_non_negative, parse_positive, parse_probability};
use crate::cmd::print_line;
use crate::exit::UsageError;
use crate::session::{Session, Workload, peak_resident};
use anyhow::Context;
use clap::Args;
use input::{Input, Line};
use ls_bundle::ids::ByteCount;
use ls_chat::{ChatTemplate, Message};
use ls_engine::memory::MemoryPlan;
use ls_engine::sampler::SamplerOptions;
use ls_engine::tokenizer::Tokenizer;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Turns are planned for in passes of at most this many tokens.
const TURN_TOKENS: u32 = 512;
/// Room for an answer, in tokens: where less is left the oldest exchange goes. At most a quarter of the context.
const ANSWER_TOKENS: u32 = 256;

/// `ls-run chat`.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  ls-run chat model.lsb --memory 1.5GiB
  ls-run chat model.lsb --system-prompt \"Answer in one sentence.\" --temp 0
  printf 'What is a tide?\\nAnd a spring tide?\\n' | ls-run chat model.lsb

In the conversation /help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    run: RunArgs,
    /// What the model is told before the conversation.
    #[arg(long, value_name = "TEXT")]
    system_prompt: Option<String>,
    /// Most tokens of an answer. [default: as many as the context holds]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    n_predict: Option<u32>,
    /// Randomness; 0 always takes the most likely token.
    #[arg(long, value_name = "T", default_value_t = 0.7, value_parser = parse_non_negative)]
    temp: f32,
    /// Choose among the K most likely tokens; 0: all.
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: u32,
    /// Choose among the most likely tokens that together have probability P.
    #[arg(long, value_name = "P", default_value_t = 0.95, value_parser = parse_probability)]
    top_p: f32,
    /// Choose among tokens at least P times as likely as the most likely one.
    #[arg(long, value_name = "P", default_value_t = 0.05, value_parser = parse_probability)]
    min_p: f32,
    /// Make recent tokens less likely; 1: no.
    #[arg(long, value_name = "R", default_value_t = 1.0, value_parser = parse_positive)]
    repeat_penalty: f32,
    /// Same seed, same conversation. [default: another each time]
    #[arg(long)]
    seed: Option<u64>,
}

const HELP: &str = "\
/reset         forget the conversation, but not the system prompt
/stats         speed, memory and reads so far
/save FILE     write the conversation: .json as messages, anything else as text
/help          this
/exit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next one. // at the beginning stands for one /.";

/// Runs the command.
pub(crate) fn run(args: &ChatArgs) -> anyhow::Result<()> {
    let mut session = Session::open(&args.run)?;
    let template = ChatTemplate::of(&session.bundle).map_err(|e| UsageError(e.to_string()))?;
    let system = args.system_prompt.as_ref().map(|text| Message::new("system", text));
    let opening: Vec<_> = system.iter().cloned().chain([Message::new("user", "")]).collect();
    // A template that takes no system prompt should say so before anything is loaded.
    template.render(&opening, SystemTime::now()).map_err(|e| UsageError(e.to_string()))?;
    let tokenizer = session.load_tokenizer()?;
    session.reserve(ByteCount(input::TURN_ALLOWANCE));
    let workload = Workload { prompt_tokens: TURN_TOKENS, scored_tokens: 0 };
    let plan = session.plan(workload)?;
    let (bundle, engine) = session.start(&plan, workload)?;
    ls_io::interrupt::catch().context("listening for Ctrl-C")?;
    let name = bundle.model().name.clone();
    let speaker = Speaker::new(bundle, engine, plan.pass_tokens);
    let seed = args.seed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
    });
    let mut chat = Chat {
        args,
        plan,
        speaker,
        tokenizer,
        template,
        messages: system.into_iter().collect(),
        seed,
        last: None,
        tells: std::io::stderr().is_terminal(),
    };
    chat.tell(&format!(
        "{name}, context {} tokens, {} of memory; /help lists commands, Ctrl-D leaves",
        chat.plan.context, chat.plan.budget
    ));
    chat.converse(&mut Input::new()?)
}

struct Chat<'a> {
    args: &'a ChatArgs,
    plan: MemoryPlan,
    speaker: Speaker,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    messages: Vec<Message>,
    seed: u64,
    last: Option<Answer>,
    /// A person sees standard error: it has remarks between the turns.
    tells: bool,
}

impl Chat<'_> {
    fn converse(&mut self, input: &mut Input) -> anyhow::Result<()> {
        loop {
            let line = match input.read()? {
                Line::End => return Ok(()),
                Line::TooLong => {
                    eprintln!("a turn may have at most {} bytes", input::MAX_TURN_BYTES);
                    continue;
                }
                Line::Text(line) => line,
            };
            let text = line.trim();
            match text.strip_prefix('/') {
                None if text.is_empty() => {}
                None => self.turn(text)?,
                Some(rest) if rest.starts_with('/') => self.turn(rest)?,
                Some(command) => {
                    if self.command(command).is_break() {
                        return Ok(());
                    }
                }
            }
        }
    }

    /// Carries out a command; nothing that goes wrong in one ends the conversation.
    fn command(&mut self, command: &str) -> ControlFlow<()> {
        let (name, argument) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, argument.trim()) {
            ("help" | "?", "") => eprintln!("{HELP}"),
            ("exit" | "quit", "") => return ControlFlow::Break(()),
            ("reset", "") => {
                self.messages.truncate(self.preamble());
                self.tell("the conversation is forgotten");
            }
            ("stats", "") => self.stats(),
            ("save", "") => eprintln!("/save needs a file's name"),
            ("save", file) => match save(Path::new(file), &self.messages) {
                Ok(()) => eprintln!("saved {} messages in {file}", self.messages.len()),
                Err(error) => eprintln!("{file}: {error}"),
            },
            _ => eprintln!("no command /{command}; /help lists them"),
        }
        ControlFlow::Continue(())
    }

    /// Messages that no conversation is without.
    fn preamble(&self) -> usize {
        usize::from(self.args.system_prompt.is_some())
    }

    /// One turn: what a person says, and the answer.
    fn turn(&mut self, text: &str) -> anyhow::Result<()> {
        self.messages.push(Message::new("user", text));
        let Some(prompt) = self.prompt()? else {
            self.messages.pop();
            return Ok(());
        };
        // One that came before belongs to no answer.
        let _ = ls_io::interrupt::take();
        let question = Question {
            tokens: &prompt,
            sampler: self.sampler(),
            max_tokens: self.args.n_predict.unwrap_or(u32::MAX),
            stop: &[],
            ignore_eos: false,
        };
        let (mut said, mut failed) = (String::new(), None);
        let answer = self.speaker.answer(&question, &mut |step, _| {
            if let Step::Text(piece) = step {
                said.push_str(piece);
                if let Err(error) = show(piece) {
                    failed = Some(error);
                    return ControlFlow::Break(());
                }
            }
            if ls_io::interrupt::take() {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        print_line("")?;
        self.messages.push(Message::new("assistant", said));
        self.remark(&answer);
        self.last = Some(answer);
        Ok(())
    }

    /// The tokens of the conversation. Where they do not leave room for an answer the oldest exchanges go. None, said on
    /// standard error, if the last turn alone is too much or the template refuses it.
    fn prompt(&mut self) -> anyhow::Result<Option<Vec<u32>>> {
        let context = self.speaker.engine().context();
        let most = (context - ANSWER_TOKENS.min(context / 4)) as usize;
        let mut left_out = 0;
        loop {
            let rendered = match self.template.render(&self.messages, SystemTime::now()) {
                Ok(rendered) => rendered,
                Err(error) => {
                    eprintln!("{error}");
                    return Ok(None);
                }
            };
            let tokens = self.tokenizer.encode(&rendered, false)?;
            if tokens.len() <= most {
                if left_out > 0 {
                    self.tell(&format!(
                        "the context of {context} tokens is full: the oldest {left_out} exchanges are left out"
                    ));
                }
                return Ok(Some(tokens));
            }
            let first = self.preamble();
            if self.messages.len() < first + 3 {
                eprintln!(
                    "this turn makes {} tokens, and the context holds {context}: say it shorter, or raise --context",
                    tokens.len()
                );
                return Ok(None);
            }
            self.messages.drain(first..first + 2);
            left_out += 1;
        }
    }

    /// Another seed for each turn, all from the conversation's.
    fn sampler(&self) -> SamplerOptions {
        SamplerOptions {
            temperature: self.args.temp,
            top_k: self.args.top_k,
            top_p: self.args.top_p,
            min_p: self.args.min_p,
            repeat_penalty: self.args.repeat_penalty,
            seed: self.seed.wrapping_add(self.messages.len() as u64),
        }
    }

    /// Says something about the conversation to a person.
    fn tell(&self, text: &str) {
        if self.tells {
            eprintln!("\x1b[2m{text}\x1b[0m");
        }
    }

    fn remark(&self, answer: &Answer) {
        let ended = match answer.end {
            End::Stop => "",
            End::Cancelled => ", stopped",
            End::Length => ", cut off at its length",
        };
        self.tell(&format!(
            "{} tokens, {:.1} a second, the first after {:.1} s{ended}",
            answer.tokens,
            answer.tok_s(),
            answer.first_token.as_secs_f64()
        ));
    }

    fn stats(&self) {
        let engine = self.speaker.engine();
        let stats = engine.stats();
        let rate = |count: u64, time: Duration| count as f64 / time.as_secs_f64().max(1e-9);
        if let Some(last) = &self.last {
            eprintln!(
                "last answer: {} of {} prompt tokens were in memory already; {} tokens, {:.2} a second, the first after {:.2} s",
                last.reused_tokens,
                last.prompt_tokens,
                last.tokens,
                last.tok_s(),
                last.first_token.as_secs_f64()
            );
        }
        eprintln!(
            "so far: prompts {} tokens, {:.1} a second; answers {} tokens, {:.2} a second; waited {:.1} s for reads",
            stats.prefill_tokens,
            rate(stats.prefill_tokens, stats.prefill),
            stats.decode_tokens,
            rate(stats.decode_tokens, stats.decode),
            stats.stalled.as_secs_f64()
        );
        if let Some(counts) = engine.cache_counts() {
            eprintln!(
                "cache: {} requests for blocks, {:.1} % of them found in memory",
                counts.requests(),
                100.0 * counts.demand_hit_ratio()
            );
        }
        eprintln!(
            "context: {} of {} tokens; memory: peak {} of {}; read {} so far",
            engine.position(),
            engine.context(),
            peak_resident().map_or_else(|_| "unknown".into(), |peak| ByteCount(peak).to_string()),
            self.plan.budget,
            ByteCount(engine.bytes_read())
        );
    }
}

/// Writes a piece of an answer.
fn show(piece: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(piece.as_bytes())?;
    out.flush()
}

fn save(file: &Path, messages: &[Message]) -> std::io::Result<()> {
    let text = if file.extension().is_some_and(|extension| extension == "json") {
        let message = |m: &Message| serde_json::json!({ "role": m.role, "content": m.content });
        let all: Vec<_> = messages.iter().map(message).collect();
        format!("{:#}\n", serde_json::json!({ "messages": all }))
    } else {
        messages.iter().map(|m| format!("{}: {}\n\n", m.role, m.content)).collect()
    };
    std::fs::write(file, text)
}
