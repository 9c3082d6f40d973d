//! `15-prompts`: calibration text as windows of tokens.
//!
//! Windows are taken at places spread over all files in proportion to their sizes, so that a small budget still sees
//! every text. They do not overlap, start at the beginning of a line where one is near, and each starts with BOS where
//! the model's prompts do. Only the text that is taken is read and encoded.
//!
//! Records: 0.0 the tokens, u32 little endian, whole windows; 0.1 the number of windows of each file, JSON.

use crate::artifact::{Artifact, Input, RecordId};
use crate::error::{PrepError, Result};
use crate::journal::Journal;
use crate::key::Key;
use crate::model::Model;
use crate::model::weights::SourceFile;
use crate::progress::Progress;
use crate::recipe::Recipe;
use crate::stage::Stage;
use crate::stages::source::Source;
use rand::{Rng, SeedableRng};
use rand_xoshiro::Xoshiro256PlusPlus;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::path::PathBuf;
use tokenizers::Tokenizer;

/// Bytes read for a token of a window at first; English takes about four. Doubled until the window is full.
const BYTES_PER_TOKEN: u64 = 6;
/// Bytes looked through for the beginning of a line.
const LINE_SEARCH_BYTES: u64 = 512;

/// The stage.
#[derive(Debug)]
pub struct Prompts<'a> {
    source: &'a Source,
    texts: Vec<SourceFile>,
    keys: Vec<Key>,
    params: Params,
}

/// What the tokens depend on besides the model and the texts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Params {
    /// The most tokens to take.
    pub tokens: u64,
    /// Tokens of a window.
    pub window: u32,
    /// Where in its share of the text each window starts.
    pub seed: u64,
}

impl<'a> Prompts<'a> {
    /// Windows of `texts`, in this order, as `recipe` says.
    pub fn new(source: &'a Source, texts: &[PathBuf], recipe: &Recipe) -> Result<Prompts<'a>> {
        if texts.is_empty() {
            let problem = "no calibration text: name files with --calibration, or let `ls-prep datasets fetch` put some into \
                           datasets/text";
            return Err(PrepError::usage(problem));
        }
        let texts = texts.iter().map(|path| SourceFile::open(path)).collect::<Result<Vec<_>>>()?;
        // Of the open files: one that has its name later may be another.
        let key = |text: &SourceFile| Key::parse(&text.hash(&mut |_| ())?.to_hex());
        let keys = texts.iter().map(key).collect::<Result<Vec<_>>>()?;
        let (tokens, window) = (recipe.calibration.tokens, recipe.calibration.window);
        let window = window.min(source.model.config.context_length);
        let params = Params { tokens, window, seed: recipe.stage_seed(Self::NAME) };
        Ok(Prompts { source, texts, keys, params })
    }

    /// At most `count` tokens of the same texts, whole windows, none of which is in a window of the stage. They lie in
    /// the middle of gaps between those, spread over all texts.
    ///
    /// # Errors
    /// If no gap has room for a window.
    pub fn held_out(&self, count: u64) -> Result<Vec<u32>> {
        Taker::new(&self.source.model, &self.texts, &self.params)?.held_out(count)
    }
}

/// What windows are taken from.
struct Taker<'a> {
    model: &'a Model,
    texts: &'a [SourceFile],
    params: &'a Params,
    tokenizer: Tokenizer,
}

impl<'a> Taker<'a> {
    fn new(model: &'a Model, texts: &'a [SourceFile], params: &'a Params) -> Result<Taker<'a>> {
        let tokenizer = Tokenizer::from_bytes(model.tokenizer.json.as_bytes())
            .map_err(|problem| PrepError::corrupt("tokenizer", problem))?;
        Ok(Taker { model, texts, params, tokenizer })
    }

    /// Windows of one text, at most `windows`: hands out each one's tokens, and where in the text they are.
    fn take(
        &self,
        text: &SourceFile,
        windows: u64,
        random: &mut Xoshiro256PlusPlus,
        put: &mut dyn FnMut(Vec<u32>, Range<u64>),
    ) -> Result<u64> {
        let body = self.body();
        let share = text.len / windows.max(1);
        let slack = share.saturating_sub(body as u64 * BYTES_PER_TOKEN);
        let (mut taken, mut free_from) = (0, 0);
        for index in 0..windows {
            let jitter = if slack == 0 { 0 } else { random.random_range(0..slack) };
            let place = (index * share + jitter).max(free_from);
            // Near the end of the text a whole window matters more than where it starts.
            let mut found = None;
            for place in [line_after(text, place)?, place, free_from] {
                let start = character_after(text, place)?;
                found =
                    encode(text, start, body, &self.tokenizer)?.map(|(ids, end)| (ids, start..end));
                if found.is_some() {
                    break;
                }
            }
            let Some((ids, place)) = found else { break };
            free_from = place.end;
            put(ids, place);
            taken += 1;
        }
        Ok(taken)
    }

    /// Tokens of text in a window.
    fn body(&self) -> usize {
        self.params.window as usize - self.bos().iter().len()
    }

    /// What each window starts with.
    fn bos(&self) -> Option<u32> {
        let special = &self.model.config.special;
        special.bos.filter(|_| special.add_bos)
    }

    /// All windows, text after text: hands out the text's number, the tokens and their place.
    fn walk(&self, put: &mut dyn FnMut(usize, Vec<u32>, Range<u64>)) -> Result<Vec<u64>> {
        let mut random = Xoshiro256PlusPlus::seed_from_u64(self.params.seed);
        let sizes: Vec<u64> = self.texts.iter().map(|text| text.len).collect();
        let windows = apportion(self.params.tokens / u64::from(self.params.window), &sizes);
        let of_text = self.texts.iter().zip(windows).enumerate();
        of_text
            .map(|(number, (text, windows))| {
                let mut put = |ids, place| put(number, ids, place);
                self.take(text, windows, &mut random, &mut put)
            })
            .collect()
    }

    /// See [`Prompts::held_out`].
    fn held_out(&self, count: u64) -> Result<Vec<u32>> {
        let mut gaps: Vec<(usize, Range<u64>)> = Vec::new();
        let mut ends = vec![0; self.texts.len()];
        self.walk(&mut |text, _, place| {
            gaps.push((text, ends[text]..place.start));
            ends[text] = place.end;
        })?;
        let tails = self.texts.iter().enumerate().map(|(n, text)| (n, ends[n]..text.len));
        gaps.extend(tails);
        let inside =
            |(number, gap): (usize, Range<u64>)| self.within(&self.texts[number], gap).transpose();
        let windows = gaps.into_iter().filter_map(inside).collect::<Result<Vec<_>>>()?;
        let wanted = (count / u64::from(self.params.window)).min(windows.len() as u64) as usize;
        let mut tokens = Vec::new();
        for taken in 0..wanted {
            tokens.extend(self.bos());
            tokens.extend(&windows[taken * windows.len() / wanted]);
        }
        if tokens.is_empty() {
            let problem = "no room for held-out windows between those that are learned from";
            return Err(PrepError::usage(format!("the calibration text has {problem}")));
        }
        Ok(tokens)
    }

    /// The text of a window in the middle of a gap, if there is room.
    fn within(&self, text: &SourceFile, gap: Range<u64>) -> Result<Option<Vec<u32>>> {
        let body = self.body();
        let slack = gap.end.saturating_sub(gap.start + body as u64 * BYTES_PER_TOKEN);
        let middle = gap.start + slack / 2;
        for place in [line_after(text, middle)?, middle, gap.start] {
            let start = character_after(text, place)?;
            if let Some((ids, end)) = encode(text, start, body, &self.tokenizer)?
                && end <= gap.end
            {
                return Ok(Some(ids));
            }
        }
        Ok(None)
    }
}

impl Stage for Prompts<'_> {
    const NAME: &'static str = "15-prompts";
    const SCHEMA: u32 = 1;
    type Params = Params;

    fn params(&self) -> Params {
        self.params
    }

    fn inputs(&self) -> Vec<Input> {
        let text =
            |(index, key): (usize, &Key)| Input { name: format!("text {}", index + 1), key: *key };
        let texts = self.keys.iter().enumerate().map(text);
        std::iter::once(self.source.input()).chain(texts).collect()
    }

    fn records(&self, _: Range<u32>) -> u64 {
        2
    }

    fn run(&self, journal: &mut Journal, _: &mut dyn Progress) -> Result<()> {
        let Windows { tokens, of_text, .. } =
            Windows::take(&self.source.model, &self.texts, &self.params)?;
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        let ids = [RecordId::new(0, 0), RecordId::new(0, 1)];
        let contents = [bytes, serde_json::to_vec(&of_text).expect("plain numbers")];
        for (id, content) in ids.into_iter().zip(contents) {
            if !journal.contains(id) {
                journal.append(id, &content)?;
            }
        }
        Ok(())
    }
}

/// The tokens of a finished stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Windows {
    /// All tokens, window after window.
    pub tokens: Vec<u32>,
    /// Tokens of a window.
    pub window: u32,
    /// Windows of each text.
    pub of_text: Vec<u64>,
}

impl Windows {
    /// Windows of `texts`, in this order, for `model`.
    pub fn take(model: &Model, texts: &[SourceFile], params: &Params) -> Result<Windows> {
        let taker = Taker::new(model, texts, params)?;
        let (bos, mut tokens) = (taker.bos(), Vec::new());
        let of_text = taker.walk(&mut |_, ids, _| {
            tokens.extend(bos);
            tokens.extend(ids);
        })?;
        if tokens.is_empty() {
            let window = params.window;
            let problem =
                format!("the calibration text is shorter than a window of {window} tokens");
            return Err(PrepError::usage(problem));
        }
        Ok(Windows { tokens, window: params.window, of_text })
    }

    /// At most so many tokens of these windows, but one window at least, from all over.
    #[must_use]
    pub fn some(&self, tokens: u64) -> Windows {
        let (window, all) = (self.window as usize, self.tokens.len() / self.window as usize);
        let count = usize::try_from(tokens).unwrap_or(usize::MAX) / window;
        let count = count.clamp(1, all);
        let (mut tokens, mut of_text) = (Vec::new(), vec![0; self.of_text.len()]);
        let texts = self.of_text.iter().enumerate();
        let texts: Vec<usize> = texts
            .flat_map(|(text, &windows)| std::iter::repeat_n(text, windows as usize))
            .collect();
        for index in (0..count).map(|index| index * all / count) {
            tokens.extend_from_slice(&self.tokens[index * window..][..window]);
            of_text[texts[index]] += 1;
        }
        Windows { tokens, window: self.window, of_text }
    }

    /// Reads the artifact of [`Prompts`] for a model whose tokens are below `vocab_size`.
    pub fn read(artifact: &Artifact, vocab_size: u32) -> Result<Windows> {
        let params: Params = artifact.params()?;
        let bytes = artifact.read(RecordId::new(0, 0))?;
        let (words, rest) = bytes.as_chunks();
        let tokens: Vec<u32> = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let window = params.window.max(1) as usize;
        if !rest.is_empty() || tokens.is_empty() || !tokens.len().is_multiple_of(window) {
            return Err(artifact.fault(format!("{} bytes are no windows", bytes.len())));
        }
        if let Some(token) = tokens.iter().find(|token| **token >= vocab_size) {
            return Err(artifact.fault(format!("token {token}; the model has {vocab_size}")));
        }
        let of_text = serde_json::from_slice(&artifact.read(RecordId::new(0, 1))?)
            .map_err(|problem| artifact.fault(problem))?;
        Ok(Windows { tokens, window: params.window, of_text })
    }
}

/// Splits `count` in proportion to `sizes`: the sum is `count`, and no share is off by one or more.
fn apportion(count: u64, sizes: &[u64]) -> Vec<u64> {
    let total: u64 = sizes.iter().sum::<u64>().max(1);
    let mut before = 0u64;
    let mut given = 0;
    let mut shares = Vec::new();
    for size in sizes {
        before += size;
        let until = (u128::from(count) * u128::from(before) / u128::from(total)) as u64;
        shares.push(until - given);
        given = until;
    }
    shares
}

/// Where the next line begins behind `place`; `place` itself at the text's start or where no line begins near.
fn line_after(text: &SourceFile, place: u64) -> Result<u64> {
    let bytes = if place == 0 { Vec::new() } else { read(text, place, LINE_SEARCH_BYTES)? };
    let line = bytes.iter().position(|&byte| byte == b'\n').map_or(0, |at| at as u64 + 1);
    Ok(place + line)
}

/// The first character that starts at `place` or behind.
fn character_after(text: &SourceFile, place: u64) -> Result<u64> {
    let inside = |byte: &&u8| **byte & 0xc0 == 0x80;
    Ok(place + read(text, place, 4)?.iter().take_while(inside).count() as u64)
}

/// The first `count` tokens behind `start` and where they end, if there are so many.
pub(super) fn encode(
    text: &SourceFile,
    start: u64,
    count: usize,
    tokenizer: &Tokenizer,
) -> Result<Option<(Vec<u32>, u64)>> {
    let mut wanted = count as u64 * BYTES_PER_TOKEN;
    loop {
        let bytes = read(text, start, wanted)?;
        let at_end = (bytes.len() as u64) < wanted;
        let valid = String::from_utf8_lossy(&bytes);
        let encoded = tokenizer
            .encode(&*valid, false)
            .map_err(|problem| PrepError::corrupt(text.path.display(), problem))?;
        // The last few tokens before a cut might be others if the text went on.
        let sure = if at_end { encoded.len() } else { encoded.len().saturating_sub(8) };
        if sure >= count {
            let end = encoded.get_offsets()[count - 1].1 as u64;
            return Ok(Some((encoded.get_ids()[..count].to_vec(), start + end)));
        }
        if at_end {
            return Ok(None);
        }
        wanted *= 2;
    }
}

fn read(text: &SourceFile, start: u64, len: u64) -> Result<Vec<u8>> {
    let len = len.min(text.len.saturating_sub(start));
    let mut bytes = vec![0; usize::try_from(len).expect("a window's text fits in memory")];
    text.read_at(start, &mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn some_windows_come_from_everywhere() {
        let windows = Windows { tokens: (0..20).collect(), window: 2, of_text: vec![7, 3] };
        let some = windows.some(9);
        assert_eq!(some.tokens, [0, 1, 4, 5, 10, 11, 14, 15]);
        assert_eq!(some.of_text, [3, 1]);
        assert_eq!(windows.some(1000), windows);
        assert_eq!(windows.some(0).tokens, [0, 1]);
    }

    proptest! {
        #[test]
        fn shares_add_up_and_follow_the_sizes(count in 0u64..1000, sizes in prop::collection::vec(0u64..10_000, 1..8)) {
            let shares = apportion(count, &sizes);
            let total: u64 = sizes.iter().sum();
            prop_assert_eq!(shares.iter().sum::<u64>(), if total == 0 { 0 } else { count });
            for (share, size) in shares.iter().zip(&sizes) {
                let exact = count as f64 * *size as f64 / total.max(1) as f64;
                prop_assert!((*share as f64 - exact).abs() < 1.0, "{} of {}", share, exact);
            }
        }
    }
}
