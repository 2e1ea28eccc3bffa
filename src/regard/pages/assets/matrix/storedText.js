// Arrays that are stored in the page as text, beside the record.

// The text of an array, once all of it is loaded: the script starts before the page is complete.
export async function loadText(number) {
  const find = () => document.getElementById(`array${number}`);
  if (document.readyState === "loading" && !find()?.nextElementSibling) {
    await new Promise((resolve) => document.addEventListener("DOMContentLoaded", resolve, { once: true }));
  }
  return find().textContent;
}
