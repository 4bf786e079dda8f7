//! Patterns for names.

/// Whether `name` matches a pattern in which `*` stands for any text and `?` for any one character.
pub fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    // Greedy with one backtracking point: the last `*`, and the end of the text that it matched.
    let (mut p, mut n, mut star) = (0, 0, None);
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p, n));
            p += 1;
        } else if pattern.get(p).is_some_and(|&c| c == '?' || c == name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((star_at, matched_end)) = star {
            star = Some((star_at, matched_end + 1));
            (p, n) = (star_at + 1, matched_end + 1);
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, expected) in [
            ("*", "", true),
            ("", "", true),
            ("", "a", false),
            ("a*c", "abbc", true),
            ("a*c", "abbcd", false),
            ("*.mlp.*", "model.layers.0.mlp.up_proj.weight", true),
            ("layers.?.x", "layers.1.x", true),
            ("layers.?.x", "layers.12.x", false),
            ("**a**b", "xxaxxb", true),
            ("?é", "éé", true),
        ] {
            assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
        }
    }
}
