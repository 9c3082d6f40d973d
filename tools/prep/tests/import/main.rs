//! Import as a user sees it: tiny models written in both formats by [`fixture`], imported, read back.
//!
//! One test program, since each links candle.

#![forbid(unsafe_code)]

mod cli;
mod cves;
mod fixture;
mod formats;
mod hostile;
mod hostile_folder;
mod tokenizers;
mod two_forms;
