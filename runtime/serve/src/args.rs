//! The command line.

use clap::Parser;
use ls_bundle::ids::ByteCount;
use ls_run::args::{RunArgs, parse_bytes};
use std::net::IpAddr;
use std::path::PathBuf;

/// Serves a model over HTTP with the interface of OpenAI's API, and a page to talk with it.
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 100,
    after_help = "\
Examples:
  ls-serve model.lsb --memory 1.5GiB
  ls-serve model.lsb --port 9000 --system dense --context 4096
  ls-serve model.lsb --host 0.0.0.0 --api-key-file key.txt

Then open http://127.0.0.1:8080, or give that address with /v1 behind it to any client of OpenAI's API.
Exit codes are those of ls-run."
)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Address to listen on. One that others can reach needs --api-key-file.
    #[arg(long, default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    #[arg(long, short, default_value_t = 8080)]
    pub(crate) port: u16,
    /// Clients must show the key in this file's first line. (In a file, as command lines can be read by all users.)
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
    /// Requests that may wait for the one being answered; more are told to come again later.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(0..=1024))]
    pub(crate) queue: u16,
    /// Largest request.
    #[arg(long, value_name = "SIZE", default_value = "64KiB", value_parser = parse_bytes)]
    pub(crate) max_body: ByteCount,
    /// Most time from a request to the end of its answer, in seconds.
    #[arg(long, value_name = "S", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) answer_timeout: u32,
    /// Most time that a client may take to send a request, or to take a piece of an answer, in seconds.
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) client_timeout: u32,
}
