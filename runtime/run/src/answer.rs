//! [`Speaker`]: prompt after prompt on one engine, each answered as text while it is decoded.
//!
//! What the KV cache holds of a prompt is not computed again: of a conversation that grew, only the new turn is. Answers
//! end where the model ends them, at a stop string (which is not part of the text), at a limit, or when whoever listens
//! has had enough. After an error the speaker takes the next prompt as if nothing had happened.

use crate::likelihood;
use ls_bundle::Bundle;
use ls_engine::sampler::{Sampler, SamplerOptions};
use ls_engine::tokenizer::{TextDecoder, text_bytes};
use ls_engine::{Engine, EngineError};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens that one pass scores at most.
pub(crate) const SCORED_TOKENS: u32 = 64;

/// What is asked for.
#[derive(Clone, Debug)]
pub struct Question<'a> {
    /// The prompt.
    pub tokens: &'a [u32],
    /// How tokens are chosen.
    pub sampler: SamplerOptions,
    /// Most tokens of the answer; the context may end it earlier.
    pub max_tokens: u32,
    /// Texts that end the answer.
    pub stop: &'a [String],
    /// Whether the answer goes on where the model would end it.
    pub ignore_eos: bool,
}

/// How far an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// This much of the prompt is in the KV cache.
    Prompt {
        /// Tokens.
        done: u32,
    },
    /// One more token of the answer.
    Token(u32),
    /// Text that is certain now: some tokens bring none, others bring what had to wait.
    Text(&'a str),
}

/// Hears of every step, with the engine's figures at that point, and may break off.
pub type Listener<'a> = dyn FnMut(Step<'_>, &Engine) -> ControlFlow<()> + 'a;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended it, or a stop string came.
    Stop,
    /// It has as many tokens as it may have.
    Length,
    /// Nobody listens any more.
    Cancelled,
}

/// What an answer was.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that the KV cache held already.
    pub reused_tokens: u32,
    /// Tokens of the answer, one that ended it not included.
    pub tokens: u32,
    /// Why it ended.
    pub end: End,
    /// From the question to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decoding: Duration,
}

impl Answer {
    /// Tokens a second after the first; 0 for fewer than two.
    #[must_use]
    pub fn tok_s(&self) -> f64 {
        if self.decoding.is_zero() {
            return 0.0;
        }
        f64::from(self.tokens.saturating_sub(1)) / self.decoding.as_secs_f64()
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Speaker {
    bundle: Arc<Bundle>,
    engine: Engine,
    /// Tokens of a prefill pass.
    pass_tokens: u32,
    /// The tokens in the KV cache.
    held: Vec<u32>,
}

impl Speaker {
    /// A speaker on an engine that holds no tokens yet.
    #[must_use]
    pub fn new(bundle: Arc<Bundle>, engine: Engine, pass_tokens: u32) -> Speaker {
        let held = Vec::with_capacity(engine.context() as usize);
        Speaker { bundle, engine, pass_tokens, held }
    }

    /// The engine, for its figures.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The same, to be looked into.
    pub fn engine_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }

    /// The bundle.
    #[must_use]
    pub fn bundle(&self) -> &Bundle {
        &self.bundle
    }

    /// Answers, while `listen` listens.
    ///
    /// # Errors
    /// The prompt is empty or longer than the context, or a read failed.
    pub fn answer(
        &mut self,
        question: &Question<'_>,
        listen: &mut Listener<'_>,
    ) -> Result<Answer, EngineError> {
        let started = Instant::now();
        let prompt = question.tokens;
        if prompt.is_empty() || prompt.len() as u64 > u64::from(self.engine.context()) {
            // The engine refuses this and says why.
            self.rewind_to(&[]);
            self.engine.prefill(prompt, 0)?;
        }
        let room = u64::from(self.engine.context()).saturating_sub(prompt.len() as u64);
        // The last token needs no place: nothing follows it.
        let most = (room + 1).min(u64::from(question.max_tokens));
        let mut answer = Answer {
            prompt_tokens: prompt.len() as u32,
            reused_tokens: self.rewind_to(prompt),
            tokens: 0,
            end: End::Length,
            first_token: Duration::ZERO,
            decoding: Duration::ZERO,
        };
        if most == 0 {
            return Ok(answer);
        }
        self.speak(question, most, started, &mut answer, listen)?;
        Ok(answer)
    }

    /// ln P(`continuation` | `prompt`), nats, summed over the continuation's tokens. What the KV cache holds of the prompt
    /// is not computed again. `by_decode`: token by token, as text is generated; else in passes, which is faster and
    /// needs a plan for as many scored tokens.
    ///
    /// # Errors
    /// Both together are longer than the context, or a read failed.
    pub(crate) fn log_likelihood(
        &mut self,
        prompt: &[u32],
        continuation: &[u32],
        by_decode: bool,
    ) -> Result<f64, EngineError> {
        self.rewind_to(prompt);
        let (&last, before) = prompt.split_last().expect("a prompt has a token");
        while self.held.len() < before.len() {
            let left = &before[self.held.len()..];
            let pass = &left[..left.len().min(self.pass_tokens as usize)];
            self.engine.prefill_part(pass, 1)?;
            self.held.extend_from_slice(pass);
        }
        let tokens: Vec<u32> = [last].into_iter().chain(continuation.iter().copied()).collect();
        let mut nll = 0.0;
        if by_decode {
            for (index, pair) in tokens.windows(2).enumerate() {
                // The prompt's last token is still the prompt's: prefill is dense in all systems.
                let logits = match index {
                    0 => self.engine.prefill(&pair[..1], 0)?,
                    _ => self.engine.decode(pair[0], 0)?,
                };
                nll += likelihood::nll(logits, pair[1]);
                self.held.push(pair[0]);
            }
            return Ok(-nll);
        }
        let step = SCORED_TOKENS.min(self.pass_tokens) as usize;
        for start in (0..continuation.len()).step_by(step) {
            let window = &tokens[start..tokens.len().min(start + step + 1)];
            nll += self.engine.score_on(window, 1)?.iter().map(|&x| f64::from(x)).sum::<f64>();
            self.held.extend_from_slice(&window[..window.len() - 1]);
        }
        Ok(-nll)
    }

    /// Forgets what `prompt` does not begin with, and at least its last token, whose logits are wanted. Returns how much
    /// is left.
    fn rewind_to(&mut self, prompt: &[u32]) -> u32 {
        let same = self.held.iter().zip(prompt).take_while(|(held, wanted)| held == wanted).count();
        let kept = same.min(prompt.len().saturating_sub(1));
        self.held.truncate(kept);
        self.engine.rewind(kept as u32);
        kept as u32
    }

    fn speak(
        &mut self,
        question: &Question<'_>,
        most: u64,
        started: Instant,
        answer: &mut Answer,
        listen: &mut Listener<'_>,
    ) -> Result<(), EngineError> {
        let vocab_size = self.bundle.model().vocab_size;
        let mut sampler = Sampler::new(question.sampler, vocab_size, question.tokens);
        let Some(mut token) = self.prefill(question.tokens, most, &mut sampler, listen)? else {
            answer.end = End::Cancelled;
            return Ok(());
        };
        let first = Instant::now();
        answer.first_token = first - started;
        let mut text = Text::new(question.stop);
        loop {
            if !question.ignore_eos && self.bundle.model().special.stop.contains(&token) {
                answer.end = End::Stop;
                break;
            }
            answer.tokens += 1;
            answer.decoding = first.elapsed();
            let (piece, stopped) = text.push(text_bytes(self.bundle.vocabulary(), token));
            let text = if piece.is_empty() { None } else { Some(Step::Text(piece)) };
            if [Step::Token(token)]
                .into_iter()
                .chain(text)
                .any(|step| listen(step, &self.engine).is_break())
            {
                answer.end = End::Cancelled;
                return Ok(());
            }
            if stopped {
                answer.end = End::Stop;
                return Ok(());
            }
            let left = most - u64::from(answer.tokens);
            if left == 0 {
                break;
            }
            let logits = self.engine.decode(token, left - 1)?;
            self.held.push(token);
            token = sampler.sample(logits);
        }
        let rest = text.finish();
        if !rest.is_empty() {
            // The answer is over whatever the listener says.
            let _ = listen(Step::Text(&rest), &self.engine);
        }
        Ok(())
    }

    /// Takes the prompt into the KV cache, pass by pass, and chooses the first token; None if the listener broke off.
    fn prefill(
        &mut self,
        prompt: &[u32],
        most: u64,
        sampler: &mut Sampler,
        listen: &mut Listener<'_>,
    ) -> Result<Option<u32>, EngineError> {
        loop {
            let step = Step::Prompt { done: self.held.len() as u32 };
            if listen(step, &self.engine).is_break() {
                return Ok(None);
            }
            let left = &prompt[self.held.len()..];
            let pass = &left[..left.len().min(self.pass_tokens as usize)];
            let passes_after = (left.len() - pass.len()).div_ceil(self.pass_tokens as usize) as u64;
            if passes_after == 0 {
                let logits = self.engine.prefill(pass, most - 1)?;
                self.held.extend_from_slice(pass);
                return Ok(Some(sampler.sample(logits)));
            }
            self.engine.prefill_part(pass, passes_after + most - 1)?;
            self.held.extend_from_slice(pass);
        }
    }
}

/// The text of an answer, held back as long as it might be the beginning of a stop string.
struct Text<'a> {
    stop: &'a [String],
    decoder: TextDecoder,
    /// All that is not certain yet, behind what was given out last.
    text: String,
    /// Bytes of `text` that were given out.
    given: usize,
}

impl<'a> Text<'a> {
    fn new(stop: &'a [String]) -> Text<'a> {
        Text { stop, decoder: TextDecoder::default(), text: String::new(), given: 0 }
    }

    /// Adds a token's bytes; returns the text that is certain now, and whether a stop string ended it.
    fn push(&mut self, bytes: &[u8]) -> (&str, bool) {
        self.text.drain(..self.given);
        self.decoder.push(bytes, &mut self.text);
        let found = self.stop.iter().filter_map(|stop| self.text.find(stop.as_str())).min();
        self.given = found.unwrap_or_else(|| self.text.len() - self.undecided());
        (&self.text[..self.given], found.is_some())
    }

    /// Bytes at the end that a stop string may begin with.
    fn undecided(&self) -> usize {
        let longest = |stop: &String| {
            let begins =
                |&len: &usize| stop.is_char_boundary(len) && self.text.ends_with(&stop[..len]);
            (1..stop.len()).rev().find(begins).unwrap_or(0)
        };
        self.stop.iter().map(longest).max().unwrap_or(0)
    }

    /// What is left when no more tokens come.
    fn finish(mut self) -> String {
        self.text.drain(..self.given);
        self.decoder.finish(&mut self.text);
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::Text;

    /// The pieces that come out, and whether a stop string ended them.
    fn pieces(stop: &[&str], tokens: &[&[u8]]) -> (Vec<String>, bool) {
        let stop: Vec<String> = stop.iter().map(|&stop| stop.to_owned()).collect();
        let mut text = Text::new(&stop);
        let mut out = Vec::new();
        for token in tokens {
            let (piece, stopped) = text.push(token);
            out.push(piece.to_owned());
            if stopped {
                return (out, true);
            }
        }
        out.push(text.finish());
        (out, false)
    }

    #[test]
    fn text_that_may_begin_a_stop_string_waits() {
        let (out, stopped) = pieces(&["END", "\n\n"], &[b"a E", b"N", b"E\n", b"b\n", b"\nc"]);
        assert_eq!(out, ["a ", "", "ENE", "\nb", ""]);
        assert!(stopped, "the blank line ends it");
        let (out, stopped) = pieces(&["END"], &[b"xEN"]);
        assert_eq!(
            (out.concat().as_str(), stopped),
            ("xEN", false),
            "what waited comes at the end"
        );
    }

    #[test]
    fn the_first_of_several_stop_strings_ends_the_text() {
        let (out, stopped) = pieces(&["cd", "b"], &[b"abcd"]);
        assert_eq!((out.concat().as_str(), stopped), ("a", true));
    }

    #[test]
    fn characters_cut_over_tokens_are_matched_whole() {
        let snow = "☃".as_bytes();
        let (out, stopped) = pieces(&["☃!"], &[b"a", &snow[..1], &snow[1..], b"?", snow, b"!"]);
        assert_eq!(out, ["a", "", "", "☃?", "", ""]);
        assert!(stopped);
    }
}
