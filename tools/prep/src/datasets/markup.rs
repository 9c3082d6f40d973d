//! HTML pages as paragraphs of text: enough for documentation, no more.
//!
//! What stands in `head`, `script`, `style`, `nav` and `pre` is left out, tags are dropped, block elements end a
//! paragraph, white space becomes single spaces. Short pieces (menus, headings, page numbers) are no paragraphs.

/// Least characters of a paragraph.
const LEAST: usize = 60;
const SKIPPED: [&str; 6] = ["head", "script", "style", "nav", "pre", "title"];
const INLINE: [&str; 22] = [
    "a", "abbr", "acronym", "b", "big", "cite", "code", "em", "font", "i", "img", "kbd", "q", "s",
    "small", "span", "strong", "sub", "sup", "tt", "u", "var",
];

/// The paragraphs of a page.
pub(super) fn paragraphs(page: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut text = String::new();
    let mut rest = page;
    while let Some(at) = rest.find('<') {
        push_text(&mut text, &rest[..at]);
        rest = &rest[at..];
        if let Some(comment) = rest.strip_prefix("<!--") {
            rest = comment.find("-->").map_or("", |end| &comment[end + 3..]);
            continue;
        }
        let Some(end) = rest.find('>') else { break };
        let (tag, behind) = (&rest[1..end], &rest[end + 1..]);
        rest = behind;
        let closing = tag.starts_with('/');
        let name = tag.trim_start_matches('/');
        let name = name.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
        let name = name.to_ascii_lowercase();
        if SKIPPED.contains(&name.as_str()) && !closing && !tag.ends_with('/') {
            rest = skip(rest, &name);
        }
        if !INLINE.contains(&name.as_str()) {
            finish(&mut text, &mut found);
        }
    }
    push_text(&mut text, rest);
    finish(&mut text, &mut found);
    found
}

/// What follows the end of the element `name`.
fn skip<'a>(rest: &'a str, name: &str) -> &'a str {
    let mut from = 0;
    while let Some(at) = rest[from..].find("</") {
        let behind = from + at + 2;
        // A name is ASCII, so if the bytes are equal the cut is between characters.
        if rest.as_bytes()[behind..]
            .get(..name.len())
            .is_some_and(|n| n.eq_ignore_ascii_case(name.as_bytes()))
        {
            return rest[behind..].find('>').map_or("", |end| &rest[behind + end + 1..]);
        }
        from = behind;
    }
    ""
}

fn finish(text: &mut String, found: &mut Vec<String>) {
    let words: Vec<&str> = text.split_whitespace().collect();
    let paragraph = words.join(" ");
    if paragraph.chars().count() >= LEAST {
        found.push(paragraph);
    }
    text.clear();
}

/// Appends `raw` with its entities decoded; unknown ones stay as they are.
fn push_text(text: &mut String, raw: &str) {
    let mut rest = raw;
    while let Some(at) = rest.find('&') {
        text.push_str(&rest[..at]);
        rest = &rest[at..];
        // An entity is short: a page of ampersands shall not be searched to its end for each.
        let end = rest.bytes().take(11).position(|byte| byte == b';');
        let entity = end.map(|end| &rest[1..end]);
        match entity.and_then(|entity| Some((entity, decode(entity)?))) {
            Some((entity, character)) => {
                text.push(character);
                rest = &rest[entity.len() + 2..];
            }
            None => {
                text.push('&');
                rest = &rest[1..];
            }
        }
    }
    text.push_str(rest);
}

fn decode(entity: &str) -> Option<char> {
    if let Some(number) = entity.strip_prefix('#') {
        let code = match number.strip_prefix(['x', 'X']) {
            Some(hex) => u32::from_str_radix(hex, 16),
            None => number.parse(),
        };
        return char::from_u32(code.ok()?);
    }
    Some(match entity {
        "amp" => '&',
        "lt" => '<',
        "gt" => '>',
        "quot" => '"',
        "apos" => '\'',
        "nbsp" => ' ',
        "ldquo" => '“',
        "rdquo" => '”',
        "lsquo" => '‘',
        "rsquo" => '’',
        "ndash" => '–',
        "mdash" => '—',
        "hellip" => '…',
        "copy" => '©',
        "eacute" => 'é',
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_becomes_its_paragraphs() {
        let long =
            "who keeps a lamp lit keeps more than a lamp, as the old people of the coast say";
        let page = format!(
            "<html><HEAD><title>No</title></HEAD><body><!-- <p>{long} in a comment</p> --><ul><li>Menu</li></ul>\
             <script>if (a < b) {{ {long} }}</script><p>One,\n  {long}&nbsp;&amp; <b>so on</b>&hellip;</p>\
             <div>Two, <a href='x'>{long}</a>.<pre>{long} code</pre></div>Three &unknown; &#233;&#x2019; {long}"
        );
        let wanted = [
            format!("One, {long} & so on…"),
            format!("Two, {long}."),
            format!("Three &unknown; é’ {long}"),
        ];
        assert_eq!(paragraphs(&page), wanted);
    }

    #[test]
    fn broken_pages_do_no_harm() {
        for page in
            ["<", "<p", "a < b", "<script>", "<!--", "&", "&;", "&#xffffffff;", "</é", "<pre></é"]
        {
            assert!(paragraphs(page).is_empty(), "{page:?}");
        }
    }
}
