//! `ls-serve`: a bundle behind OpenAI's HTTP interface, for programs, and a page, for people.
//!
//! One model, one engine, one answer at a time: `decoder` runs on a thread of its own and takes requests from a short
//! queue; a request that finds it full is told so at once. The HTTP side (`routes`, `listener`) runs on the main
//! thread and holds no more than its limits: connections, bytes of a request, time. All of it is in the memory plan.
//!
//! Without a key the server answers only programs of the same machine: it listens on loopback, and refuses requests
//! under other hosts' names and those that a foreign page can send without asking.
#![forbid(unsafe_code)]

pub mod api;
mod args;
mod decoder;
mod error;
mod figures;
mod guard;
mod listener;
mod reply;
mod routes;

use anyhow::Context;
use args::ServeArgs;
use clap::Parser;
use decoder::Decoder;
use ls_bundle::ids::ByteCount;
use ls_chat::ChatTemplate;
use ls_run::answer::Speaker;
use ls_run::exit::{Exit, UsageError};
use ls_run::session::{Session, Workload};
use routes::App;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Prompts are planned for in passes of at most this many tokens.
const PROMPT_TOKENS: u32 = 512;
/// Connections at the same time; further ones wait to be accepted.
const MAX_CONNECTIONS: usize = 32;
/// Heap of a connection: its buffers and what is on its way through them.
const CONNECTION_BYTES: u64 = 64 << 10;
/// What tokenizing takes for a moment, in bytes a byte of text. Measured: 80 to 150.
const ENCODE_FACTOR: u64 = 160;

/// What the program does.
#[must_use]
pub fn main() -> ExitCode {
    match run(&ServeArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ls-serve: {error:#}");
            ExitCode::from(Exit::of(&error) as u8)
        }
    }
}

fn run(args: &ServeArgs) -> anyhow::Result<()> {
    let key = args.api_key_file.as_deref().map(guard::read_key).transpose()?;
    if key.is_none() && !args.host.is_loopback() {
        let text = format!(
            "{} can be reached by others: give --api-key-file, or listen on 127.0.0.1",
            args.host
        );
        return Err(UsageError(text).into());
    }
    let mut session = Session::open(&args.run)?;
    // A model without a template can still continue texts; what is wrong is said to who asks for a chat.
    let template = ChatTemplate::of(&session.bundle);
    let name = args.run.name();
    let tokenizer = session.load_tokenizer()?;
    let body = args.max_body.0;
    session.reserve(ByteCount((MAX_CONNECTIONS as u64) * (CONNECTION_BYTES + body)));
    session.reserve(ByteCount(ENCODE_FACTOR * body));
    let workload = Workload { prompt_tokens: PROMPT_TOKENS, scored_tokens: 0 };
    let plan = session.plan(workload)?;
    let (system, vocab_size) = (session.system(), session.bundle.model().vocab_size);
    let (bundle, engine) = session.start(&plan, workload)?;
    let speaker = Speaker::new(bundle, engine, plan.pass_tokens);
    let decoder = Arc::new(Decoder::new(usize::from(args.queue)));
    let thread = decoder.start(speaker).context("starting the decoder's thread")?;
    let app = App {
        decoder: Arc::clone(&decoder),
        tokenizer,
        template,
        name,
        vocab_size,
        system,
        plan,
        key,
        max_body: args.max_body,
        answer_timeout: Duration::from_secs(args.answer_timeout.into()),
        client_timeout: Duration::from_secs(args.client_timeout.into()),
    };
    let address = SocketAddr::new(args.host, args.port);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the server")?;
    let (patience, router) = (app.client_timeout, routes::router(app));
    let served =
        runtime.block_on(listener::serve(address, router, MAX_CONNECTIONS, patience, || {
            decoder.stop()
        }));
    // It may have ended before it began.
    decoder.stop();
    // The thread ends after the token it is at.
    let _ = thread.join();
    served
}
