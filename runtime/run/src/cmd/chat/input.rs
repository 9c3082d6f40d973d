//! Where turns come from: an edited line of a terminal, or the next line of a pipe.

use rustyline::error::ReadlineError;
use rustyline::history::MemHistory;
use rustyline::{Config, Editor};
use std::io::{BufRead, IsTerminal, Read};

/// Longest turn. Tokenizing takes memory for a moment, many times a text's size.
pub(super) const MAX_TURN_BYTES: u64 = 32 << 10;
/// What reading, rendering and tokenizing a turn takes beside the engine: a context's worth of text, all at once.
pub(super) const TURN_ALLOWANCE: u64 = 8 << 20;

/// What was read.
#[derive(Debug)]
pub(super) enum Line {
    /// A turn or a command.
    Text(String),
    /// More than [`MAX_TURN_BYTES`]; it was skipped.
    TooLong,
    /// Nothing more comes.
    End,
}

/// See the module's documentation.
pub(super) enum Input {
    Terminal(Box<Editor<(), MemHistory>>),
    Pipe,
}

impl Input {
    /// Standard input, edited if people are at both ends.
    pub(super) fn new() -> anyhow::Result<Input> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Input::Pipe);
        }
        let config = Config::builder().auto_add_history(true).build();
        Ok(Input::Terminal(Box::new(Editor::with_history(config, MemHistory::new())?)))
    }

    /// The next turn. Lines that end with a backslash go on in the next one.
    pub(super) fn read(&mut self) -> anyhow::Result<Line> {
        let mut text = String::new();
        loop {
            match self.read_line(if text.is_empty() { "> " } else { "… " })? {
                Line::Text(line) => text.push_str(&line),
                Line::End if !text.is_empty() => return Ok(Line::Text(text)),
                other => return Ok(other),
            }
            if text.len() as u64 > MAX_TURN_BYTES {
                return Ok(Line::TooLong);
            }
            match text.pop() {
                Some('\\') => text.push('\n'),
                last => {
                    text.extend(last);
                    return Ok(Line::Text(text));
                }
            }
        }
    }

    fn read_line(&mut self, prompt: &str) -> anyhow::Result<Line> {
        match self {
            Input::Pipe => read_pipe(&mut std::io::stdin().lock()),
            Input::Terminal(editor) => loop {
                match editor.readline(prompt) {
                    Ok(line) => return Ok(Line::Text(line)),
                    Err(ReadlineError::Eof) => return Ok(Line::End),
                    // Ctrl-C drops what was typed, as in a shell.
                    Err(ReadlineError::Interrupted) => {}
                    Err(error) => return Err(error.into()),
                }
            },
        }
    }
}

/// A line without its end. Bytes that are not UTF-8 become U+FFFD.
fn read_pipe(input: &mut dyn BufRead) -> anyhow::Result<Line> {
    let mut bytes = Vec::new();
    let mut limited = input.take(MAX_TURN_BYTES + 1);
    limited.read_until(b'\n', &mut bytes)?;
    if bytes.is_empty() {
        return Ok(Line::End);
    }
    if bytes.len() as u64 > MAX_TURN_BYTES && bytes.last() != Some(&b'\n') {
        skip_line(input)?;
        return Ok(Line::TooLong);
    }
    let text = String::from_utf8_lossy(&bytes);
    Ok(Line::Text(text.trim_end_matches(['\n', '\r']).to_owned()))
}

fn skip_line(input: &mut dyn BufRead) -> std::io::Result<()> {
    loop {
        let buffer = input.fill_buf()?;
        let (skipped, over) = match buffer.iter().position(|&byte| byte == b'\n') {
            Some(at) => (at + 1, true),
            None => (buffer.len(), buffer.is_empty()),
        };
        input.consume(skipped);
        if over {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Line, MAX_TURN_BYTES, read_pipe};

    #[test]
    fn a_line_that_is_too_long_is_skipped_and_the_next_is_read() {
        let long = MAX_TURN_BYTES as usize;
        let text = format!("{}\r\n{}\nafter\n\nlast", "a".repeat(long - 1), "b".repeat(long * 3));
        let mut input = std::io::BufReader::with_capacity(1000, text.as_bytes());
        let mut next = || read_pipe(&mut input).unwrap();
        assert!(matches!(next(), Line::Text(text) if text.len() == long - 1));
        assert!(matches!(next(), Line::TooLong));
        assert!(matches!(next(), Line::Text(text) if text == "after"));
        assert!(matches!(next(), Line::Text(text) if text.is_empty()));
        assert!(matches!(next(), Line::Text(text) if text == "last"));
        assert!(matches!(next(), Line::End));
    }
}
